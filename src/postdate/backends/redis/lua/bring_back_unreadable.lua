-- place ('s' and the store, or 'q'): bring back what earlier versions had moved to keys of its own; return how many
local place = take()
local base, keys = unreadable_keys(place)
local moved = 0
for _, number in ipairs(call('ZRANGE', base .. ':xs', 0, -1)) do
  local former = base .. ':x:' .. number
  if call('EXISTS', former) == 1 then
    local member
    if place == 'q' then
      member = string.format('%.0f', call('INCR', tag .. ':q:number'))
    else
      member = call('HGET', former, 'i') or ''
      if member == '' or call('EXISTS', keys .. member) == 1 then
        member = '\0' .. number -- its id is gone, or was stored anew; no id begins with that
      end
    end
    call('RENAME', former, keys .. member)
    call('ZREM', base .. ':xs', number)
    call('ZADD', base .. ':xs', number, member)
    moved = moved + 1
  end
end
return moved
