-- queue, number to begin after, how many: number and fields of what nobody holds
local queue, after, count = take(), take(), tonumber(take())
local found = {}
local numbers = call('ZRANGE', tag .. ':q:' .. queue .. ':ready', '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, count)
for _, number in ipairs(numbers) do
  found[#found + 1] = { number, unpack(fields_of(tag .. ':qm:' .. number, 'i', 'h', 'b', 'x', 'd', 'f', 'u'), 1, 7) }
end
return found
