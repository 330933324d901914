-- place ('s' and the store, or 'q'), how many: number and all fields of each unreadable message, the oldest first
local place, count = take(), tonumber(take())
local base, keys = unreadable_keys(place)
local members, found = call('ZRANGE', base .. ':xs', 0, count - 1, 'WITHSCORES'), {}
for at = 1, #members, 2 do
  found[#found + 1] = { string.format('%.0f', tonumber(members[at + 1])), call('HGETALL', keys .. members[at]) }
end
return found
