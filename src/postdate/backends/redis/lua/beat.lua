-- holder, grace in microseconds, about: say that it lives, and free what the dead hold. 0: it counts as dead itself.
local holder, grace, about = take(), tonumber(take()), take()
local holders, now = tag .. ':holders', clock()
if not call('ZSCORE', holders, holder) then
  return 0
end
credit_common_silence(holders, now)
call('ZADD', holders, now, holder)
call('HSET', tag .. ':about', holder, about)
local all = call('ZRANGE', holders, 0, -1, 'WITHSCORES')
for at = 1, #all, 2 do
  local other, silent = all[at], now - tonumber(all[at + 1])
  local limit = tonumber(call('HGET', tag .. ':limits', other) or '0')
  if other ~= holder and silent > math.min(grace, limit) then
    if silent > limit or call('PUBSUB', 'NUMSUB', tag .. ':alive:' .. other)[2] == 0 then
      forget_holder(other, true)
    end
  end
end
return 1
