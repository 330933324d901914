-- holder, claimant, first and last number: declare its claims from first to last - 1 void, whether they have come or not,
-- and free what they hold
local holder, claimant, first, last = take(), take(), tonumber(take()), tonumber(take())
if not call('ZSCORE', tag .. ':holders', holder) then
  return 0
end
local fence = tonumber(call('HGET', tag .. ':fence:' .. holder, claimant) or '0')
call('HSET', tag .. ':fence:' .. holder, claimant, math.max(fence, last))
local held, count = call('HGETALL', tag .. ':held:' .. holder), 0
for at = 1, #held, 2 do
  local token = fields_of(held[at], 't')[1]
  local of, by = string.match(token or '', '^[^:]*:([^:]*):(%d+)$')
  if of == claimant and tonumber(by) >= first and tonumber(by) < last then
    free_key(held[at], held[at + 1])
    count = count + 1
  end
end
return count
