-- names: how many messages nobody holds, of each; -1: there is no such queue
local found, now = {}, clock()
for at = 1, #ARGV do
  if call('SISMEMBER', tag .. ':queues', ARGV[at]) == 1 then
    drop_expired(ARGV[at], now)
    found[at] = call('ZCARD', tag .. ':q:' .. ARGV[at] .. ':ready')
  else
    found[at] = -1
  end
end
return found
