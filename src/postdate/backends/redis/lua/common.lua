-- What every script begins with. KEYS[1] is the hash tag, such as {postdate}: all keys begin with it, so that a cluster
-- has them in one slot. ARGV is read from the front by take().
--
-- Instants are 18 digits, microseconds since the year 1, compared as text: the numbers of Lua and the scores of sorted
-- sets are doubles, which count microseconds exactly up to the year 2255 only.
--
--   {tag}:holders      sorted set: who holds messages, by when it was last heard (microseconds of this server's clock)
--   {tag}:about, {tag}:limits   by holder: what it says of itself; after how long a silence it loses what it holds
--   {tag}:held:HOLDER  keys of what it holds, each with "s" and the store or "q" and the queue
--   {tag}:fence:HOLDER by claimant: claims with a lower number are void, whenever they come
--   STORE:m:ID         a waiting message: i d q h b x f; D and A, its members in :due and :free; t, the token of its claim
--   STORE:due, :free   sorted sets without scores: instant, number of storing, id; all of them, and those nobody holds
--   STORE:r:ID         records of one message; STORE:counts  of each kind
--   {tag}:qm:NUMBER    a message in a queue: i h b x d f; u, how often a process died that held it; Q, its queue; e, when
--                      it ends there; B, the store it came from; of that are D and A, which mean nothing here
--   {tag}:q:NAME:ready, :ends   sorted sets of numbers, by place in the queue and by when they end
--   PLACE:xs           sorted set of what cannot be read, by the number of marking: ids of a store, or numbers of all
--                      queues; their hashes have reason and at, and dump, as DUMP wrote what was no hash
--   STORE:xr:ID        what was in the way of the records of a message
local tag = KEYS[1]
local call = redis.call
local argument = 0

local function take()
  argument = argument + 1
  return ARGV[argument]
end

local function clock()
  local parts = call('TIME')
  return tonumber(parts[1]) * 1000000 + tonumber(parts[2])
end

-- Microseconds from one instant to another, exact as far as a double goes.
local function between(from, to)
  local seconds = tonumber(string.sub(to, 1, 12)) - tonumber(string.sub(from, 1, 12))
  return seconds * 1000000 + tonumber(string.sub(to, 13)) - tonumber(string.sub(from, 13))
end

local function is_instant(text)
  return text and #text == 18 and not string.find(text, '%D')
end

local function holder_of(token)
  return string.match(token, '^([^:]*)')
end

local function id_of(member)
  return string.sub(member, 37)
end

-- what others put in the place of a message or its records -----------------------------------------------------------

-- Return what a command answers; nothing where the key is of another type than it takes.
local function softly(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then
    return answer
  end
  if not string.find(answer.err, '^WRONGTYPE') then
    error(answer)
  end
end

-- Return fields of a message; none where its key is no hash.
local function fields_of(key, ...)
  local found = softly('HMGET', key, ...)
  if not found then
    found = {}
    for place = 1, select('#', ...) do
      found[place] = false
    end
  end
  return found
end

-- Let a key without content be a hash: it can be held, and is marked as all that cannot be read. Its bytes are kept.
local function as_hash(key)
  local bytes = call('TYPE', key).ok ~= 'hash' and call('DUMP', key)
  if bytes then
    call('DEL', key)
    call('HSET', key, 'dump', bytes)
  end
end

-- wake-ups -----------------------------------------------------------------------------------------------------------

local woken = {}

local function wake(channel, text)
  if not woken[channel] then
    woken[channel] = true
    call('PUBLISH', channel, text)
  end
end

local function first_free(store)
  return call('ZRANGE', store .. ':free', 0, 0)[1]
end

local function wake_if_earlier(store, before)
  local first = first_free(store)
  if first and (not before or string.sub(first, 1, 18) < string.sub(before, 1, 18)) then
    wake(store .. ':wake', string.sub(first, 1, 18))
  end
end

-- records ------------------------------------------------------------------------------------------------------------

local SCHEDULED, DELIVERED, RETRIED, EXPIRED, FAILED = '1', '2', '4', '5', '7'
local RESCHEDULED, DISCARDED, RETURNED = '8', '9', '10'

local function line_of(kind, at, due, destination, detail)
  return table.concat({ kind, at, is_instant(due) and due or '', destination or '', detail }, '\0')
end

local function last_line(store, id)
  return softly('LINDEX', store .. ':r:' .. id, -1)
end

local function add_line(store, id, line)
  local key = store .. ':r:' .. id
  if not softly('RPUSH', key, line) then
    call('RENAME', key, store .. ':xr:' .. id)
    call('RPUSH', key, line)
  end
end

local function record(store, kind, id, at, due, destination, detail)
  add_line(store, id, line_of(kind, at, due, destination, detail))
  call('HINCRBY', store .. ':counts', kind, 1)
  if kind == DELIVERED then
    call('SET', store .. ':last', at)
  end
end

-- a message of a store -----------------------------------------------------------------------------------------------

local function insert(store, message)
  local number = string.format('%016d', call('INCR', store .. ':number'))
  local member = message.d .. ':' .. number .. ':' .. message.i
  local fields = { 'i', message.i, 'd', message.d, 'q', message.q, 'h', message.h, 'b', message.b, 'D', member, 'A', member }
  if message.x ~= '' then
    fields[#fields + 1] = 'x'
    fields[#fields + 1] = message.x
  end
  call('HSET', store .. ':m:' .. message.i, unpack(fields))
  call('ZADD', store .. ':due', 0, member)
  call('ZADD', store .. ':free', 0, member)
end

local function taken_message()
  return { i = take(), d = take(), q = take(), h = take(), b = take(), x = take() }
end

-- Return what storing a message is recorded as: it is new, or comes back after it went to the error queue last, where that
-- is allowed; nil: its id is known.
local function storing_of(store, id, may_come_back)
  if call('EXISTS', store .. ':m:' .. id) == 1 then
    return nil
  end
  local last = last_line(store, id)
  if not last then
    return SCHEDULED
  end
  return may_come_back and string.sub(last, 1, 2) == FAILED .. '\0' and RESCHEDULED or nil
end

local function store_one(store, now, message, may_come_back)
  local kind = message.kind or storing_of(store, message.i, may_come_back)
  if kind then
    insert(store, message)
    local detail = kind == RESCHEDULED and 'came back from the error queue' or ''
    record(store, kind, message.i, now, message.d, message.q, detail)
  end
  return kind
end

local function unhold(key, token)
  if token then
    call('HDEL', tag .. ':held:' .. holder_of(token), key)
    call('HDEL', key, 't')
  end
end

-- Take a message out of every index of its store.
local function unlist(store, key, id)
  local found = fields_of(key, 'D', 'A', 't')
  if found[1] then
    call('ZREM', store .. ':due', found[1])
  end
  if found[2] then
    call('ZREM', store .. ':free', found[2])
  end
  call('SREM', store .. ':failing', id)
  unhold(key, found[3])
end

local function end_one(store, kind, id, now, detail)
  local key = store .. ':m:' .. id
  local found = fields_of(key, 'd', 'q')
  unlist(store, key, id)
  call('DEL', key)
  record(store, kind, id, now, found[1], found[2], detail)
end

-- Give a message of a store back, to be attempted after an instant; '' means after the one it had.
local function free_one(store, id, attempt)
  local key = store .. ':m:' .. id
  local found = fields_of(key, 'A', 't')
  local member = found[1]
  unhold(key, found[2])
  if not member then
    return
  end
  if attempt ~= '' then
    call('ZREM', store .. ':free', member)
    member = attempt .. string.sub(member, 19)
    call('HSET', key, 'A', member)
  end
  call('ZADD', store .. ':free', 0, member)
end

local function is_held(store, id, token)
  return fields_of(store .. ':m:' .. id, 't')[1] == token
end

-- a message of a queue -----------------------------------------------------------------------------------------------

local NEVER = 9007199254740992

local function ends_there(queue, key, number, end_at)
  if end_at < NEVER then
    call('HSET', key, 'e', string.format('%.0f', end_at))
    call('ZADD', tag .. ':q:' .. queue .. ':ends', string.format('%.0f', end_at), number)
  end
end

local function enqueue(queue, key, number, end_at)
  if end_at then
    ends_there(queue, key, number, end_at)
  end
  call('ZADD', tag .. ':q:' .. queue .. ':ready', number, number)
  wake(tag .. ':q:' .. queue .. ':wake', '')
end

local function requeue(key, number)
  local found = fields_of(key, 'Q', 'e', 't')
  unhold(key, found[3])
  if found[1] then
    enqueue(found[1], key, number, found[2] and tonumber(found[2]))
  end
end

local function number_in(key)
  return string.sub(key, #tag + 5)
end

local function drop_expired(queue, now)
  local ends, ready = tag .. ':q:' .. queue .. ':ends', tag .. ':q:' .. queue .. ':ready'
  local text = string.format('(%.0f', now)
  while true do
    local numbers = call('ZRANGE', ends, '-inf', text, 'BYSCORE', 'LIMIT', 0, 500)
    for _, number in ipairs(numbers) do
      call('ZREM', ends, number)
      call('ZREM', ready, number)
      call('DEL', tag .. ':qm:' .. number)
    end
    if #numbers < 500 then
      return
    end
  end
end

-- who holds ----------------------------------------------------------------------------------------------------------

local function free_key(key, place)
  if string.sub(place, 1, 1) == 's' then
    local store = string.sub(place, 2)
    free_one(store, string.sub(key, #store + 4), '')
    wake(store .. ':wake', '')
  else
    requeue(key, number_in(key))
  end
end

-- Move the last signs of life of all holders ahead by the time in which none of them was heard: then this server was away,
-- or its clock stepped. The silence of a holder counts only while another one was heard, which beats every second.
local function credit_common_silence(holders, now)
  local newest = tonumber(call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or now)
  local common = math.max(0, now - newest - 1000000)
  if common == 0 and newest <= now then
    return
  end
  local last_heard = call('ZRANGE', holders, 0, -1, 'WITHSCORES')
  for at = 1, #last_heard, 2 do
    -- Not later than now: after a step back of the clock, a dead holder would count as alive until then.
    local score = math.min(now, tonumber(last_heard[at + 1]) + common)
    call('ZADD', holders, string.format('%.0f', score), last_heard[at])
  end
end

-- Release what a holder has. Where it died: count that for each message of a queue, which may have been the cause.
local function forget_holder(holder, has_died)
  local held = call('HGETALL', tag .. ':held:' .. holder)
  for at = 1, #held, 2 do
    if has_died and string.sub(held[at + 1], 1, 1) == 'q' and fields_of(held[at], 't')[1] then
      redis.pcall('HINCRBY', held[at], 'u', 1) -- what others wrote there is no number: it is marked when it is received
    end
    free_key(held[at], held[at + 1])
  end
  call('DEL', tag .. ':held:' .. holder, tag .. ':fence:' .. holder)
  call('ZREM', tag .. ':holders', holder)
  call('HDEL', tag .. ':about', holder)
  call('HDEL', tag .. ':limits', holder)
  return #held / 2
end

-- Whether a claim may be made: the holder is known to live, and nobody has declared this claim void.
local function may_claim(holder, token)
  if not call('ZSCORE', tag .. ':holders', holder) then
    return false
  end
  local claimant, number = string.match(token, '^[^:]*:([^:]*):(%d+)$')
  local fence = call('HGET', tag .. ':fence:' .. holder, claimant)
  return not fence or tonumber(number) >= tonumber(fence)
end

-- what cannot be read ------------------------------------------------------------------------------------------------

-- Return the prefixes of the keys of a place ('s' and the store, or 'q'), and of its messages.
local function unreadable_keys(place)
  if string.sub(place, 1, 1) == 's' then
    local store = string.sub(place, 2)
    return store, store .. ':m:'
  end
  return tag .. ':q', tag .. ':qm:'
end

-- Mark a message that is in no index any more: it keeps its key and all fields but our own.
local function mark_unreadable(base, key, member, reason, now)
  call('HSET', key, 'reason', reason, 'at', now)
  call('HDEL', key, 't', 'A', 'D')
  call('ZADD', base .. ':xs', call('INCR', base .. ':xnumber'), member)
end
