-- place ('s' and the store, or 'q'), now, key, id, token, reason: set a held message aside
local place, now, key, id, token, reason = take(), take(), take(), take(), take(), take()
if fields_of(key, 't')[1] ~= token then
  return 0
end
if string.sub(place, 1, 1) == 's' then
  local store = string.sub(place, 2)
  local found = call('HMGET', key, 'd', 'q')
  unlist(store, key, id)
  call('HSETNX', key, 'i', id)
  set_aside(store, key, reason, now)
  record(store, FAILED, id, now, found[1], found[2], 'unreadable: ' .. reason)
else
  unhold(key, token)
  set_aside(tag .. ':q', key, reason, now)
end
return 1
