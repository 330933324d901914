-- holder, about, limit in microseconds
local holder, about, limit = take(), take(), take()
call('ZADD', tag .. ':holders', clock(), holder)
call('HSET', tag .. ':about', holder, about)
call('HSET', tag .. ':limits', holder, limit)
return 1
