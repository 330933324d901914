-- number, token, whether handling it failed: 0 when it is not held by that token
local number, token, failed = take(), take(), take() == '1'
local key = tag .. ':qm:' .. number
if fields_of(key, 't')[1] ~= token then
  return 0
end
if failed then
  call('HINCRBY', key, 'f', 1)
end
requeue(key, number)
return 1
