-- store, holder, token, now, messages at most, bytes at most: return id and fields of each; false where it may not
local store, holder, token, now, limit, bytes = take(), take(), take(), take(), tonumber(take()), tonumber(take())
if not may_claim(holder, token) then
  return false
end
local found, size = {}, 0
for _, member in ipairs(call('ZRANGE', store .. ':free', '-', '(' .. now, 'BYLEX', 'LIMIT', 0, limit)) do
  local id = id_of(member)
  local key = store .. ':m:' .. id
  local fields = fields_of(key, 'd', 'q', 'h', 'b', 'x', 'f')
  size = size + #(fields[3] or '') + #(fields[4] or '')
  if size > bytes and #found > 0 then
    break
  end
  call('ZREM', store .. ':free', member)
  if not fields[3] then
    as_hash(key)
    for name, value in pairs({ i = id, d = string.sub(member, 1, 18), D = member, A = member }) do
      call('HSETNX', key, name, value) -- what its place among others still says of it
    end
  end
  call('HSET', key, 't', token)
  call('HSET', tag .. ':held:' .. holder, key, 's' .. store)
  found[#found + 1] = { id, unpack(fields, 1, 6) }
end
return found
