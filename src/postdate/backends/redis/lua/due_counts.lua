-- store, instants in their order: how many are due from each to the next
local store, counts = take(), {}
for place = 2, #ARGV - 1 do
  counts[#counts + 1] = call('ZLEXCOUNT', store .. ':due', '[' .. ARGV[place], '(' .. ARGV[place + 1])
end
return counts
