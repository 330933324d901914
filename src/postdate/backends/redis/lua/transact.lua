-- A sequence of parts, all of which are done or none: everything that can fail is looked at before anything is changed.
--   hold number token kind detail now           take a held message off its queue
--   send strict now count (queue id headers body expiry due time-to-be-received)...
--   store store now count (message)...
--   finish store kind now detail count (id token)...
-- Return {'done', places of messages whose queue is missing} or what was in the way: {'lost'}, {'queue', name},
-- {'claim', id}, {'known', id}.
local parts, seen = {}, {}
while argument < #ARGV do
  local part = { what = take() }
  if part.what == 'hold' then
    part.number, part.token, part.kind, part.detail, part.now = take(), take(), take(), take(), take()
    if fields_of(tag .. ':qm:' .. part.number, 't')[1] ~= part.token then
      return { 'lost' }
    end
  elseif part.what == 'send' then
    part.strict, part.now = take() == '1', take()
    for place = 1, tonumber(take()) do
      local sent = { queue = take(), i = take(), h = take(), b = take(), x = take(), d = take(), lasts = take() }
      sent.is_missing = call('SISMEMBER', tag .. ':queues', sent.queue) == 0
      if sent.is_missing and part.strict then
        return { 'queue', sent.queue }
      end
      part[place] = sent
    end
  elseif part.what == 'store' then
    part.store, part.now = take(), take()
    for place = 1, tonumber(take()) do
      local message = taken_message()
      message.kind = not seen[message.i] and storing_of(part.store, message.i, true)
      if not message.kind then
        return { 'known', message.i }
      end
      seen[message.i], part[place] = true, message
    end
  else
    part.store, part.kind, part.now, part.detail = take(), take(), take(), take()
    for place = 1, tonumber(take()) do
      part[place] = { id = take(), token = take() }
      if not is_held(part.store, part[place].id, part[place].token) then
        return { 'claim', part[place].id }
      end
    end
  end
  parts[#parts + 1] = part
end

local time, missing, first_free_before = clock(), {}, {}

local function send_one(sent, now)
  local number = call('INCR', tag .. ':q:number')
  local key = tag .. ':qm:' .. number
  local fields = { 'i', sent.i, 'h', sent.h, 'b', sent.b, 'Q', sent.queue }
  local left = sent.lasts ~= '' and tonumber(sent.lasts) or nil
  for name, value in pairs({ x = sent.x, d = sent.d }) do
    if value ~= '' then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  if sent.x ~= '' then
    left = math.min(left or NEVER, between(now, sent.x))
  end
  call('HSET', key, unpack(fields))
  enqueue(sent.queue, key, number, left and time + left)
end

for _, part in ipairs(parts) do
  if part.what == 'hold' then
    local key = tag .. ':qm:' .. part.number
    local found = call('HMGET', key, 'i', 'd', 'Q', 'B')
    unhold(key, part.token)
    call('DEL', key)
    if found[4] and part.kind ~= '' then
      record(found[4], part.kind, found[1] or '', part.now, found[2], found[3], part.detail)
    end
  elseif part.what == 'send' then
    for place, sent in ipairs(part) do
      if sent.is_missing then
        missing[#missing + 1] = place - 1
      else
        send_one(sent, part.now)
      end
    end
  elseif part.what == 'store' then
    if first_free_before[part.store] == nil then
      first_free_before[part.store] = first_free(part.store) or false
    end
    for _, message in ipairs(part) do
      store_one(part.store, part.now, message, true)
    end
  else
    for _, claim in ipairs(part) do
      end_one(part.store, part.kind, claim.id, part.now, part.detail)
    end
  end
end
-- After all parts: a store is announced once, with the earliest message of all of them.
for store, before in pairs(first_free_before) do
  wake_if_earlier(store, before)
end
return { 'done', missing }
