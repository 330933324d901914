-- place ('s' and the store, or 'q'), now, number: delete an unreadable message; 0: there is none of that number
local place, now, number = take(), take(), take()
local base, keys = unreadable_keys(place)
local member = call('ZRANGE', base .. ':xs', number, number, 'BYSCORE')[1]
if not member then
  return 0
end
local found = call('HMGET', keys .. member, 'i', 'd', 'q', 'reason')
call('DEL', keys .. member)
call('ZREM', base .. ':xs', member)
if string.sub(place, 1, 1) == 's' and found[1] then
  record(base, DISCARDED, found[1], now, found[2], found[3], 'unreadable: ' .. (found[4] or ''))
end
return 1
