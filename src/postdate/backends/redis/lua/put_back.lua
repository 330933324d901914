-- store, now, number, message, its failures: 0: nothing of that number; 1: done; 2: the id waits already
local store, now, number = take(), take(), take()
local message, failures = taken_message(), take()
local aside = store .. ':x:' .. number
if call('EXISTS', aside) == 0 then
  return 0
end
if call('EXISTS', store .. ':m:' .. message.i) == 1 then
  return 2
end
local last = last_line(store, message.i)
if last and string.sub(last, 1, 2) ~= FAILED .. '\0' then
  return 2
end
local before = first_free(store)
insert(store, message)
if failures ~= '0' then
  call('HSET', store .. ':m:' .. message.i, 'f', failures)
  call('SADD', store .. ':failing', message.i)
end
call('DEL', aside)
call('ZREM', store .. ':xs', number)
record(store, RETURNED, message.i, now, message.d, message.q, '')
wake_if_earlier(store, before)
return 1
