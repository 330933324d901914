-- every message of a queue that is held: holder, key, queue, and its fields
local found = {}
for _, holder in ipairs(call('ZRANGE', tag .. ':holders', 0, -1)) do
  local held = call('HGETALL', tag .. ':held:' .. holder)
  for at = 1, #held, 2 do
    if string.sub(held[at + 1], 1, 1) == 'q' then
      local fields = fields_of(held[at], 'i', 'h', 'b', 'x', 'd', 'f', 'u')
      found[#found + 1] = { holder, number_in(held[at]), string.sub(held[at + 1], 2), unpack(fields, 1, 7) }
    end
  end
end
return found
