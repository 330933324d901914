-- store, level, now, messages at most, whether to list them: move what is due to its queue, record what has expired.
-- Bodies are not touched: the key of a message is renamed.
local store, level, now, limit, listing = take(), take(), take(), tonumber(take()), take() == '1'
local free, time, looked, from = store .. ':free', clock(), 0, '-'
local delivered, expired, listed = 0, 0, {}
local number, exists = tonumber(call('GET', tag .. ':q:number') or '0'), {}

local function is_queue(name)
  if exists[name] == nil then
    exists[name] = call('SISMEMBER', tag .. ':queues', name) == 1
  end
  return exists[name]
end

-- What is the same for all messages of a page is done once for all of them.
local gone, dues, ready = {}, {}, {}

local function finish_page()
  if #gone > 0 then
    call('ZREM', free, unpack(gone))
    call('ZREM', store .. ':due', unpack(dues))
  end
  local count = 0
  for queue, places in pairs(ready) do
    call('ZADD', tag .. ':q:' .. queue .. ':ready', unpack(places))
    wake(tag .. ':q:' .. queue .. ':wake', '')
    count = count + #places / 2
  end
  if count > 0 then
    call('SET', tag .. ':q:number', string.format('%.0f', number))
    if level ~= 'none' then
      call('HINCRBY', store .. ':counts', DELIVERED, count)
      call('SET', store .. ':last', now)
    end
  end
  gone, dues, ready = {}, {}, {}
end

local function deliver(member, id, key, queue, ends, due, listed_due, failures)
  number = number + 1
  local place = string.format('%.0f', number)
  local moved = tag .. ':qm:' .. place
  call('RENAME', key, moved)
  call('HSET', moved, 'Q', queue, 'B', store)
  if failures then
    call('HDEL', moved, 'f')
    call('SREM', store .. ':failing', id)
  end
  gone[#gone + 1] = member
  dues[#dues + 1] = listed_due or member
  ready[queue] = ready[queue] or {}
  table.insert(ready[queue], place)
  table.insert(ready[queue], place)
  if is_instant(ends) then
    ends_there(queue, moved, place, time + between(now, ends))
  end
  if level ~= 'none' then
    call('RPUSH', store .. ':r:' .. id, line_of(DELIVERED, now, due, queue, ''))
  end
end

while delivered + expired < limit and looked < limit + 5000 do
  local members = call('ZRANGE', free, from, '(' .. now, 'BYLEX', 'LIMIT', 0, 500)
  for _, member in ipairs(members) do
    if delivered + expired == limit then
      break
    end
    local id = id_of(member)
    local key = store .. ':m:' .. id
    local found = call('HMGET', key, 'q', 'x', 'd', 'D', 'f')
    local queue, ends = found[1], found[2]
    local is_expired, is_delivered = is_instant(ends) and ends < now, false
    if is_expired then
      end_one(store, level, EXPIRED, id, now, '')
      expired = expired + 1
    elseif queue and is_queue(queue) then
      deliver(member, id, key, queue, ends, found[3], found[4], found[5])
      delivered, is_delivered = delivered + 1, true
    end
    if listing and (is_expired or is_delivered) then
      listed[#listed + 1] = { id, found[4] or member, queue or '', is_expired and 1 or 0 }
    end
    looked = looked + 1
    from = '(' .. member
  end
  finish_page()
  if #members < 500 then
    break
  end
end
local first, left_behind = call('ZRANGE', free, 0, 0)[1], 0
if first and string.sub(first, 1, 18) < now then
  local queue = call('HGET', store .. ':m:' .. id_of(first), 'q')
  if not queue or not is_queue(queue) then
    left_behind = 1
  end
end
return { delivered, expired, left_behind, first or false, listed }
