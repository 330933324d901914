-- store, kind, now, id, holder that may: unless another holds it
local store, kind, now, id, holder = take(), take(), take(), take(), take()
local found = fields_of(store .. ':m:' .. id, 'D', 't')
if not found[1] or (found[2] and holder_of(found[2]) ~= holder) then
  return 0
end
end_one(store, kind, id, now, '')
return 1
