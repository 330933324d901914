-- store, kind, now, detail, number of claims, id and token of each: return how many were held
local store, kind, now, detail, count = take(), take(), take(), take(), tonumber(take())
local done = 0
for _ = 1, count do
  local id, token = take(), take()
  if is_held(store, id, token) then
    end_one(store, kind, id, now, detail)
    done = done + 1
  end
end
return done
