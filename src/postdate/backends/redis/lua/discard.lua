-- place ('s' and the store, or 'q'), now, number: delete what was set aside; 0: there is nothing
local place, now, number = take(), take(), take()
local is_store = string.sub(place, 1, 1) == 's'
local base = is_store and string.sub(place, 2) or tag .. ':q'
local aside = base .. ':x:' .. number
local found = call('HMGET', aside, 'i', 'd', 'q')
if call('DEL', aside) == 0 then
  return 0
end
call('ZREM', base .. ':xs', number)
if is_store and found[1] then
  record(base, DISCARDED, found[1], now, found[2], found[3], '')
end
return 1
