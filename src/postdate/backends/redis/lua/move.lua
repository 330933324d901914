-- store, now, messages at most, whether to list them: move what is due to its queue, record what has expired.
-- Bodies are not touched: the key of a message is renamed.
local store, now, limit, listing = take(), take(), tonumber(take()), take() == '1'
local free, exists = store .. ':free', {}
local PAGE = 500

local function is_queue(name)
  if exists[name] == nil then
    exists[name] = call('SISMEMBER', tag .. ':queues', name) == 1
  end
  return exists[name]
end

-- What is to be done, looked at before anything is changed -----------------------------------------------------------

local plan = {}

local function plan_one(member)
  local id = id_of(member)
  local key = store .. ':m:' .. id
  local found = fields_of(key, 'q', 'x', 'd', 'D', 'f')
  local queue, ends = found[1], found[2]
  local one = { member = member, id = id, key = key, queue = queue, ends = ends, due = found[3], listed_due = found[4] }
  one.failures, one.is_expired = found[5], is_instant(ends) and ends < now
  if not one.is_expired and not (queue and is_queue(queue)) then
    return
  end
  plan[#plan + 1] = one
end

local looked, from = 0, '-'
while #plan < limit and looked < limit + 5000 do
  local members = call('ZRANGE', free, from, '(' .. now, 'BYLEX', 'LIMIT', 0, PAGE)
  for _, member in ipairs(members) do
    if #plan == limit then
      break
    end
    plan_one(member)
    looked = looked + 1
    from = '(' .. member
  end
  if #members < PAGE then
    break
  end
end

-- Doing it -----------------------------------------------------------------------------------------------------------

local time, delivered, expired, listed, sent = clock(), 0, 0, {}, {}
local number = tonumber(call('GET', tag .. ':q:number') or '0')
-- What is the same for all messages of a page is done once for all of them.
local gone, dues, ready, first_due = {}, {}, {}, nil

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
    sent[queue] = (sent[queue] or 0) + #places / 2
  end
  if count > 0 then
    call('SET', tag .. ':q:number', string.format('%.0f', number))
    call('HINCRBY', store .. ':counts', DELIVERED, count)
    call('SET', store .. ':last', now)
  end
  gone, dues, ready = {}, {}, {}
end

local function deliver(one)
  number = number + 1
  local place, queue = string.format('%.0f', number), one.queue
  local moved = tag .. ':qm:' .. place
  call('RENAME', one.key, moved)
  call('HSET', moved, 'Q', queue, 'B', store)
  if one.failures then
    call('HDEL', moved, 'f')
    call('SREM', store .. ':failing', one.id)
  end
  gone[#gone + 1] = one.member
  dues[#dues + 1] = one.listed_due or one.member
  ready[queue] = ready[queue] or {}
  table.insert(ready[queue], place)
  table.insert(ready[queue], place)
  if is_instant(one.ends) then
    ends_there(queue, moved, place, time + between(now, one.ends))
  end
  add_line(store, one.id, line_of(DELIVERED, now, one.due, queue, ''))
end

for place, one in ipairs(plan) do
  if one.is_expired then
    end_one(store, EXPIRED, one.id, now, '')
    expired = expired + 1
  else
    deliver(one)
    delivered = delivered + 1
    first_due = first_due or one.listed_due or one.member
  end
  if listing then
    listed[#listed + 1] = { one.id, one.listed_due or one.member, one.queue or '', one.is_expired and 1 or 0 }
  end
  if place % PAGE == 0 or place == #plan then
    finish_page()
  end
end

local first, left_behind = call('ZRANGE', free, 0, 0)[1], 0
if first and string.sub(first, 1, 18) < now then
  local queue = fields_of(store .. ':m:' .. id_of(first), 'q')[1]
  if not queue or not is_queue(queue) then
    left_behind = 1
  end
end
local to = {}
for queue, count in pairs(sent) do
  to[#to + 1] = { queue, count }
end
return { delivered, expired, left_behind, first or false, to, first_due or false, listed }
