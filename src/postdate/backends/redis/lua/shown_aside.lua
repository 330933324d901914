-- place, how many: number and all fields of what is set aside, oldest first
local place, count = take(), tonumber(take())
local found = {}
for _, number in ipairs(call('ZRANGE', place .. ':xs', 0, count - 1)) do
  found[#found + 1] = { number, call('HGETALL', place .. ':x:' .. number) }
end
return found
