-- store, id, token or '' with the holder that may, attempt or '' for its due time, now, reason, whether to record it
local store, id, token, holder, attempt, now, reason, recorded = take(), take(), take(), take(), take(), take(), take(), take()
local key = store .. ':m:' .. id
local found = fields_of(key, 'd', 'q', 't', 'D')
if not found[4] then
  return 0
end
if token ~= '' and found[3] ~= token then
  return 0
end
if token == '' and found[3] and holder_of(found[3]) ~= holder then
  return 0
end
local before = first_free(store)
if attempt == '' then
  attempt = string.sub(found[4], 1, 18)
end
call('HINCRBY', key, 'f', 1)
call('SADD', store .. ':failing', id)
free_one(store, id, attempt)
if recorded == '1' then
  record(store, RETRIED, id, now, found[1], found[2], reason)
end
wake_if_earlier(store, before)
return 1
