-- store, level, now, messages at most, whether to list them: move what is due to its queue, record what has expired.
-- Bodies are not touched: the key of a message is renamed.
local store, level, now, limit, listing = take(), take(), take(), tonumber(take()), take() == '1'
local free, time, looked, from = store .. ':free', clock(), 0, '-'
local delivered, expired, listed = 0, 0, {}
while delivered + expired < limit and looked < limit + 5000 do
  local members = call('ZRANGE', free, from, '(' .. now, 'BYLEX', 'LIMIT', 0, 500)
  for _, member in ipairs(members) do
    if delivered + expired == limit then
      break
    end
    local id = id_of(member)
    local key = store .. ':m:' .. id
    local found = call('HMGET', key, 'q', 'x', 'd')
    local queue, ends = found[1], found[2]
    local is_expired = is_instant(ends) and ends < now
    if is_expired then
      end_one(store, level, EXPIRED, id, now, '')
      expired = expired + 1
    elseif queue and call('SISMEMBER', tag .. ':queues', queue) == 1 then
      unlist(store, key, id)
      local number = call('INCR', tag .. ':q:number')
      local moved = tag .. ':qm:' .. number
      call('RENAME', key, moved)
      call('HDEL', moved, 'A', 'D', 'f')
      call('HSET', moved, 'Q', queue, 'B', store)
      enqueue(queue, moved, number, is_instant(ends) and time + between(now, ends))
      record(store, level, DELIVERED, id, now, found[3], queue, '')
      delivered = delivered + 1
    else
      queue = nil
    end
    if listing and (is_expired or queue) then
      listed[#listed + 1] = { id, string.sub(member, 1, 18), found[1] or '', is_expired and 1 or 0, found[3] or '' }
    end
    looked = looked + 1
    from = '(' .. member
  end
  if #members < 500 then
    break
  end
end
local first, left_behind = call('ZRANGE', free, 0, 0)[1], 0
if first and string.sub(first, 1, 18) < now then
  local queue = call('HGET', store .. ':m:' .. id_of(first), 'q')
  if not queue or call('SISMEMBER', tag .. ':queues', queue) == 0 then
    left_behind = 1
  end
end
return { delivered, expired, left_behind, first or false, listed }
