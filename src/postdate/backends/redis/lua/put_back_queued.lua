-- number, headers, body, due or '': 0: nothing of that number; 1: done; 2: its queue is gone
local number, headers, body, due = take(), take(), take(), take()
local aside = tag .. ':q:x:' .. number
local queue = call('HGET', aside, 'Q')
if call('EXISTS', aside) == 0 then
  return 0
end
if not queue or call('SISMEMBER', tag .. ':queues', queue) == 0 then
  return 2
end
local place = call('INCR', tag .. ':q:number')
local key = tag .. ':qm:' .. place
call('RENAME', aside, key)
call('HDEL', key, 'reason', 'at', 'e')
call('HSET', key, 'h', headers, 'b', body)
if due ~= '' then
  call('HSET', key, 'd', due)
end
call('ZREM', tag .. ':q:xs', number)
enqueue(queue, key, place)
return 1
