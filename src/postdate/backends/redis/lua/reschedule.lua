-- store, now, id, its member in :free as it was read, due, headers: 0 when another was faster
local store, now, id, was, due, headers = take(), take(), take(), take(), take(), take()
local key = store .. ':m:' .. id
local found = fields_of(key, 'A', 't', 'D', 'q')
if found[1] ~= was or found[2] then
  return 0
end
local before, member = first_free(store), due .. string.sub(was, 19)
call('ZREM', store .. ':due', found[3])
call('ZREM', store .. ':free', was)
call('HDEL', key, 'f') -- it has all its retries again
call('SREM', store .. ':failing', id)
call('HSET', key, 'd', due, 'h', headers, 'D', member, 'A', member)
call('ZADD', store .. ':due', 0, member)
call('ZADD', store .. ':free', 0, member)
record(store, RESCHEDULED, id, now, due, found[4], '')
wake_if_earlier(store, before)
return 1
