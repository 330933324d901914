-- place ('s' and the store, or 'q'), now, key, id, token, reason: mark a held message as unreadable
local place, now, key, id, token, reason = take(), take(), take(), take(), take(), take()
if fields_of(key, 't')[1] ~= token then
  return 0
end
if string.sub(place, 1, 1) == 's' then
  local store = string.sub(place, 2)
  local found = call('HMGET', key, 'd', 'q')
  unlist(store, key, id)
  call('HSETNX', key, 'i', id)
  mark_unreadable(store, key, id, reason, now)
  record(store, FAILED, id, now, found[1], found[2], 'unreadable: ' .. reason)
else
  unhold(key, token)
  mark_unreadable(tag .. ':q', key, number_in(key), reason, now)
end
return 1
