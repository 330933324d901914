-- queue, holder, token, messages at most, bytes at most, id or '', deaths from which on a message is a suspect: return the
-- number and fields of each; 1: there is no such queue; false where it may not. A suspect is returned alone.
local queue, holder, token, limit, bytes, wanted = take(), take(), take(), tonumber(take()), tonumber(take()), take()
local suspect_after = tonumber(take())
if call('SISMEMBER', tag .. ':queues', queue) == 0 then
  return 1
end
if not may_claim(holder, token) then
  return false
end
local ready, ends = tag .. ':q:' .. queue .. ':ready', tag .. ':q:' .. queue .. ':ends'
drop_expired(queue, clock())
local numbers = {}
if wanted == '' then
  numbers = call('ZRANGE', ready, 0, limit - 1)
else
  for _, number in ipairs(call('ZRANGE', ready, 0, -1)) do
    if fields_of(tag .. ':qm:' .. number, 'i')[1] == wanted then
      numbers = { number }
      break
    end
  end
end
local found, size = {}, 0
for _, number in ipairs(numbers) do
  local key = tag .. ':qm:' .. number
  local fields = fields_of(key, 'i', 'h', 'b', 'x', 'd', 'f', 'u')
  local is_suspect = (tonumber(fields[7] or 0) or 0) >= suspect_after
  size = size + #(fields[2] or '') + #(fields[3] or '')
  if (is_suspect or size > bytes) and #found > 0 then
    break
  end
  call('ZREM', ready, number)
  call('ZREM', ends, number)
  if not fields[2] then
    as_hash(key)
  end
  call('HSET', key, 't', token, 'Q', queue)
  call('HSET', tag .. ':held:' .. holder, key, 'q' .. queue)
  found[#found + 1] = { number, unpack(fields, 1, 7) }
  if is_suspect then
    break
  end
end
return found
