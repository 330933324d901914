-- store, now: pending, due before now, free, failing, unreadable, first member of :due
local store, now = take(), take()
return {
  call('ZCARD', store .. ':due'),
  call('ZLEXCOUNT', store .. ':due', '-', '(' .. now),
  call('ZCARD', store .. ':free'),
  call('SCARD', store .. ':failing'),
  call('ZCARD', store .. ':xs'),
  call('ZRANGE', store .. ':due', 0, 0)[1] or false,
}
