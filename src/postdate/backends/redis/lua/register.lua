-- holder, about, limit in microseconds
local holder, about, limit = take(), take(), take()
local now = clock()
credit_common_silence(tag .. ':holders', now) -- before this holder counts as one that was heard
call('ZADD', tag .. ':holders', now, holder)
call('HSET', tag .. ':about', holder, about)
call('HSET', tag .. ':limits', holder, limit)
return 1
