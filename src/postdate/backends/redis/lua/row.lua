-- store, id: the fields that page.lua returns of a message
return fields_of(take() .. ':m:' .. take(), 'd', 'q', 'h', 'b', 'x', 'f', 'A', 't')
