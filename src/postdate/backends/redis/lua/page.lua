-- store, first and last member as ZRANGE has them, how many, destination or '': return the last member looked at, and
-- the id, member and fields of each that is for the destination
local store, first, last, count, destination = take(), take(), take(), tonumber(take()), take()
local members, found, size = call('ZRANGE', store .. ':due', first, last, 'BYLEX', 'LIMIT', 0, count), {}, 0
local seen = false
for _, member in ipairs(members) do
  local id = id_of(member)
  local fields = fields_of(store .. ':m:' .. id, 'd', 'q', 'h', 'b', 'x', 'f', 'A', 't')
  seen = member
  if destination == '' or fields[2] == destination then
    found[#found + 1] = { id, member, unpack(fields, 1, 8) }
    size = size + #(fields[4] or '')
  end
  if size > 8388608 then
    break
  end
end
return { seen, found }
