-- store, attempt or '', number of claims, id and token of each
local store, attempt, count = take(), take(), tonumber(take())
local before, freed = first_free(store), 0
for _ = 1, count do
  local id, token = take(), take()
  if is_held(store, id, token) then
    free_one(store, id, attempt)
    freed = freed + 1
  end
end
wake_if_earlier(store, before)
return freed
