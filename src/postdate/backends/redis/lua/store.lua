-- store, now, whether what failed may come back, number of messages, these: return the places of those known
local store, now, may_come_back, count = take(), take(), take() == '1', tonumber(take())
local before, known = first_free(store), {}
for place = 1, count do
  if not store_one(store, now, taken_message(), may_come_back) then
    known[#known + 1] = place - 1
  end
end
wake_if_earlier(store, before)
return known
