-- Reservations of one fleet, and siblings in flight: the second part of the library ts1_fleet.
--
-- Ledger:   HASH of one router registration, request sequence (8 bytes) -> reservation (11 bytes:
--           slot u16, generation u32, prefill tokens u32, state u8), and behind it the hash of the
--           block it awaits (8 bytes), if any; or 'x' where a release came before its reserve.
--           It says something only as long as its router is registered.
-- Awaited:  HASH of one slot, request sequence (8 bytes) and router id -> block hash: once the
--           engine has stored that block, the request's prefill has ended. It says something only
--           as long as that ledger has that request in prefill on that slot and generation.
-- Siblings: HASH of one prefix (its last block hash names it), slot -> who is about to compute it
--           there: generation u32, request sequence (8 bytes), valid until (f64), router id. It says
--           something only as long as that router's ledger has that request in prefill on that slot
--           and generation; anything else is ignored, and deleted where writing is allowed.

local RESERVATION_FORMAT, PREFILL, DECODE = '<I2I4I4I1', 0, 1
local SYNC_ROW, NO_BLOCK = 31, '\0\0\0\0\0\0\0\0'
local CANDIDATE, MILESTONE = 10, 12
local TOMBSTONE = 'x'
local LEDGER_TTL_S = 7200  -- as in reservations.py; every renewal sets it again
local SIBLING_FORMAT, SIBLING_ROUTER = '<I4c8d', 21
local SIBLINGS_PER_PREFIX_MAX, SIBLINGS_MANY = 64, 8

local LOAD_FORMAT, LEASE_OFFSET = '<I4I4I4I4I4I4', 48  -- of a record: what leads it; LEASE

-- Adds to (or with negative numbers takes from) what is reserved on a slot, unless the slot has
-- passed to another generation or is free (false). Never below zero; having to see to that is an
-- error, which the audit tells.
local function book(counters, slot, generation, requests, tokens)
  local record = read_slot(counters, slot)
  if record[GENERATION] ~= generation or record[FLAGS] == 0 then return false end
  if record[REQUESTS] + requests < 0 or record[TOKENS] + tokens < 0 then count_clamped(counters) end
  record[REQUESTS] = math.max(0, record[REQUESTS] + requests)
  record[TOKENS] = math.max(0, record[TOKENS] + tokens)
  record[PEAK] = math.max(record[PEAK], record[REQUESTS])
  write_slot(counters, slot, record)
  return true
end

-- Nobody has to tell any more when this reservation's prefill ends.
local function stop_awaiting(counters, router, sequence, value)
  if #value > RESERVATION then
    redis.call('HDEL', awaited_key(counters, struct.unpack('<I2', value)), sequence .. router)
  end
end

-- Takes one reservation value off the counters, whatever of it is still booked.
local function unbook(counters, router, sequence, value)
  if value == TOMBSTONE then return 0 end
  local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
  stop_awaiting(counters, router, sequence, value)
  book(counters, slot, generation, -1, state == PREFILL and -tokens or 0)
  return 1
end

-- One slot's record out of all counters.
local function record_in(counters, slot)
  local at = HEADER + slot * RECORD
  if #counters < at + RECORD then counters, at = string.rep('\0', RECORD), 0 end
  return {struct.unpack(RECORD_FORMAT, counters, at + 1)}
end

-- Whether a sibling's request is still in prefill where it says. `slot_of` tells generation and flags
-- of a slot as they are.
local function sibling_lives(slot_of, ledgers, slot, value, now)
  local generation, sequence, until_s = struct.unpack(SIBLING_FORMAT, value)
  if until_s < now then return false end
  local entry = redis.call('HGET', ledgers .. string.sub(value, SIBLING_ROUTER), sequence)
  if not entry or entry == TOMBSTONE then return false end
  local booked_slot, booked_generation, _, state = struct.unpack(RESERVATION_FORMAT, entry)
  if booked_slot ~= slot or booked_generation ~= generation or state ~= PREFILL then
    return false
  end
  local current, flags = slot_of(slot)
  return current == generation and flags ~= 0
end

-- The deepest milestone of a chain at which each slot has a sibling: slot -> {tokens, generation}.
-- Milestones come shallow first (12 bytes each: depth in tokens u32, block hash). Nearly always no
-- key exists, which one call tells. All that exist are looked at, deepest first: which of them a
-- request has written depends on what its instance held, so there is nothing to bisect. But where
-- many siblings were found, a prefix that names as many slots is taken to name the same ones; at
-- worst a credit is missed. Second, whether there was any key.
local function siblings_of(slot_of, ledgers, prefix, milestones, now, prune)
  local keys = {}
  for i = 1, #milestones, MILESTONE do
    keys[#keys + 1] = prefix .. string.sub(milestones, i + 4, i + 11)
  end
  local present = #keys > 0 and redis.call('EXISTS', unpack(keys)) or 0
  local found, lives, count, left = {}, {}, 0, present
  for i = #keys, 1, -1 do
    if left == 0 then break end
    local named = count > SIBLINGS_MANY and redis.call('HLEN', keys[i])
    local siblings = named == count and {} or redis.call('HGETALL', keys[i])
    if named == count or #siblings > 0 then left = left - 1 end
    for j = 1, #siblings, 2 do
      local slot, value = tonumber(siblings[j]), siblings[j + 1]
      if found[slot] == nil then
        local who = siblings[j] .. value
        if lives[who] == nil then
          lives[who] = sibling_lives(slot_of, ledgers, slot, value, now)
        end
        if lives[who] then
          count = count + 1
          found[slot] = {struct.unpack('<I4', milestones, (i - 1) * MILESTONE + 1),
            struct.unpack('<I4', value)}
        elseif prune then
          redis.call('HDEL', keys[i], siblings[j])
        end
      end
    end
  end
  return found, present > 0
end

-- Tells the siblings of a request what it is about to compute: every milestone beyond hit tokens.
local function announce_sibling(prefix, milestones, present, hit, slot, value, ttl_ms)
  for i = 1, #milestones, MILESTONE do
    if struct.unpack('<I4', milestones, i) > hit then
      local key = prefix .. string.sub(milestones, i + 4, i + 11)
      if not present or redis.call('HLEN', key) < SIBLINGS_PER_PREFIX_MAX
        or redis.call('HEXISTS', key, slot) == 1 then
        redis.call('HSET', key, slot, value)
        redis.call('PEXPIRE', key, ttl_ms)
      end
    end
  end
end

-- read: the counters of the whole fleet, and who is about to compute prefixes of a chain.
-- KEYS[1] counters; ARGV (all or none) ledger key prefix, sibling key prefix, milestones (12 bytes
-- each: depth in tokens u32, block hash; shallow first); '' each for none where the request's class
-- prefixes follow (classes_v1.lua).
-- Returns {seconds, microseconds, counters, siblings (10 bytes each: slot u16, generation u32,
-- tokens u32), what `recent_classes` returns or '', contexts}; counters '' when there is no fleet.
-- O(milestones + prefixes), and O(siblings) where there are.
local function read(keys, args)
  local t = redis.call('TIME')
  local siblings, counters, contexts = {}, counters_and_contexts(keys[1])
  if args[3] then
    local function slot_of(slot)
      local record = record_in(counters, slot)
      return record[GENERATION], record[FLAGS]
    end
    local found = siblings_of(slot_of, args[1], args[2], args[3], now_s(), false)
    for slot, sibling in pairs(found) do
      siblings[#siblings + 1] = struct.pack('<I2I4I4', slot, sibling[2], sibling[1])
    end
  end
  local recent = args[4] and recent_classes(keys[1], args[4], now_s()) or ''
  return {t[1], t[2], counters, table.concat(siblings), recent, contexts}
end

-- register: begin or renew a router's lease.
-- KEYS[1] routers, KEYS[2] ledger; ARGV router id, lease_ttl_s, ttl_s, 1 to begin or 0 to renew.
-- Returns 1, or 0 when the lease to renew has been reaped or lost: register anew under another id.
local function register(keys, args)
  if not redis.call('ZSCORE', keys[1], args[1]) then
    if args[4] == '0' then return 0 end
    redis.call('DEL', keys[2])  -- of a registration that was lost, it counts no longer
  end
  redis.call('ZADD', keys[1], now_s() + tonumber(args[2]), args[1])
  redis.call('EXPIRE', keys[1], args[3])
  redis.call('EXPIRE', keys[2], args[3])
  return 1
end

-- What a candidate has to compute, once those before it have computed what they will.
local function new_after(sibling, new, prompt, block)
  if sibling == nil then return new end
  local reusable = math.min(sibling[1], prompt - 1)
  return math.min(new, prompt - (reusable - reusable % block))
end

-- Looks at every candidate with the counters of this moment, `all`; a table for each of a hundred
-- would cost as much as all the rest.
-- Returns states of all; the choice or the least product, nil when it is not open; the index at which
-- the request is booked already, or nil; whether a candidate has other new prefill tokens than were
-- expected.
local function weigh(all, args, found, booked, now)
  local candidates, choice, prompt = args[3], tonumber(args[4]), tonumber(args[9])
  local states, best, again, moved = {}, nil, nil, false
  for i = 0, #candidates / CANDIDATE - 1 do
    local slot, generation, new = struct.unpack('<I2I4I4', candidates, i * CANDIDATE + 1)
    local at, queued, batch, open = HEADER + slot * RECORD + 1, 0, 0, false
    if #all >= at + RECORD - 1 then
      local current, flags, requests, tokens, _, foreign = struct.unpack(LOAD_FORMAT, all, at)
      queued, batch = tokens, requests + foreign
      open = current == generation and flags == USED
        and struct.unpack('<d', all, at + LEASE_OFFSET) >= now
    end
    if open and prompt then
      new = new_after(found[slot], new, prompt, struct.unpack('<I2', args[10], i * 2 + 1))
      moved = moved or args[11] ~= '' and struct.unpack('<I4', args[11], i * 4 + 1) ~= new
    end
    if booked and struct.unpack('<I2', booked) == slot then
      local _, _, tokens, state = struct.unpack(RESERVATION_FORMAT, booked)
      again, batch = i, math.max(0, batch - 1)
      if state == PREFILL then queued, new = math.max(0, queued - tokens), tokens end
    end
    states[#states + 1] = struct.pack('<I4I4I4', queued, batch, new)
    if open and (choice == -1 or choice == i) then
      local slowness = (args[14] or '') ~= '' and struct.unpack('<I2', args[14], i * 2 + 1) or 1
      local score = (queued + new) * slowness * (batch + 1)
      if best == nil or score < best.score or (score == best.score
        and (new < best.new or (new == best.new and batch < best.batch))) then
        best = {index = i, slot = slot, generation = generation, score = score, new = new,
          batch = batch}
      end
    end
  end
  return table.concat(states), best, again, moved
end

-- reserve: choose an instance with the counters of this very moment and book the request on it.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence (8 bytes),
-- candidates (10 bytes each: slot u16, generation u32, new prefill tokens u32 by the index; equals
-- come in the order of preference), choice: -1 = the least (queued + new prefill tokens) x (batch
-- size + 1), ties by fewer new prefill tokens, then fewer requests, then order; else the index of
-- the only acceptable candidate, and then: its batch size when it was chosen, or -1 for whatever it
-- is by now. For siblings in flight (all or none): ledger key prefix, sibling key prefix,
-- milestones as in `read`, prompt tokens, block sizes of the candidates' engines (u16 each), their
-- new prefill tokens when the choice was made (u32 each; '' for whatever they are), least new
-- prefill tokens that siblings are told of, for how many ms ('' each for none, where more follows).
-- Where devices differ: how slow each candidate's prefill is (u16 each), a factor of its product; ''
-- for alike where more follows. For classes (classes_v1.lua): its prefixes, verdict on its class
-- (class, what is said u8, least streak u32, details) or '', which candidates are holders (u8 each);
-- '' each for none, where more follows. Prompt tokens, whatever of it is in flight, for what the new
-- ones attend to; absent or 0: that is not told.
-- Returns {status, index, states of all candidates (12 bytes each: queued prefill tokens u32, batch
-- size u32, before this reservation; new prefill tokens u32)}; status 'ok', 'moved' (the choice has
-- another batch size by now, or a candidate other new prefill tokens: score again), 'gone' (no
-- candidate is open), 'lost' (this router is not registered), 'late' (released before it was
-- reserved). A repeat of a booked sequence is 'ok' with the tokens booked, and books nothing.
-- Cost: O(candidates), at most CANDIDATES_PER_RESERVE_MAX, and as `read`; telling siblings is
-- O(milestones).
local function reserve(keys, args)
  local counters, sequence, expected_batch = keys[1], args[2], tonumber(args[5])
  if not redis.call('ZSCORE', keys[2], args[1]) then return {'lost', -1, ''} end
  local booked = redis.call('HGET', keys[3], sequence)
  if booked == TOMBSTONE then return {'late', -1, ''} end
  local now = now_s()
  local ledgers, siblings, milestones, prompt = args[6], args[7], args[8], tonumber(args[9])
  local records, found, present, all, contexts = {}, {}, false, counters_and_contexts(counters)
  local function record_of(slot)  -- one read of them all costs less than a few of one each
    if records[slot] == nil then records[slot] = record_in(all, slot) end
    return records[slot]
  end
  if prompt then
    local function slot_of(slot) return record_of(slot)[GENERATION], record_of(slot)[FLAGS] end
    found, present = siblings_of(slot_of, ledgers, siblings, milestones, now, true)
  end
  local states, best, again, moved = weigh(all, args, found, booked, now)
  if again then return {'ok', again, states} end
  if best == nil then return {'gone', -1, states} end
  if expected_batch >= 0 and (moved or best.batch ~= expected_batch) then
    return {'moved', best.index, states}
  end
  local record = record_of(best.slot)
  redis.call('HSET', keys[3], sequence,
    struct.pack(RESERVATION_FORMAT, best.slot, best.generation, best.new, PREFILL))
  if redis.call('HLEN', keys[3]) == 1 then redis.call('EXPIRE', keys[3], LEDGER_TTL_S) end
  local context = mean_context(tonumber(args[18] or '0'), best.new)
  book_context(counters, contexts, best.slot, record[TOKENS], best.new, context)
  record[REQUESTS] = record[REQUESTS] + 1
  record[TOKENS] = record[TOKENS] + best.new
  record[PEAK] = math.max(record[PEAK], record[REQUESTS])
  record[LAST_RESERVED] = math.floor(now)
  write_slot(counters, best.slot, record)
  if prompt and best.new >= tonumber(args[12]) then
    local ttl_ms = tonumber(args[13])
    local sibling = struct.pack(SIBLING_FORMAT, best.generation, sequence, now + ttl_ms / 1000)
    announce_sibling(siblings, milestones, present, prompt - best.new, best.slot,
      sibling .. args[1], ttl_ms)
  end
  if (args[15] or '') ~= '' then
    count_classes(counters, args[15], now)
    if args[16] ~= '' then
      judge_class(counters, args[16], string.byte(args[17], best.index + 1) == 1, now)
    end
  end
  return {'ok', best.index, states}
end

-- prefilled: the request's prefill has ended; its tokens are no longer queued.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence.
-- Returns 1, or 0 when there was nothing (left) to take. O(1).
local function prefilled(keys, args)
  local value = redis.call('HGET', keys[3], args[2])
  if not value or value == TOMBSTONE then return 0 end
  if not redis.call('ZSCORE', keys[2], args[1]) then return 0 end
  local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
  if state ~= PREFILL then return 0 end
  book(keys[1], slot, generation, 0, -tokens)
  stop_awaiting(keys[1], args[1], args[2], value)
  redis.call('HSET', keys[3], args[2], struct.pack(RESERVATION_FORMAT, slot, generation, 0, DECODE))
  return 1
end

-- release: the request has ended, however it ended.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence, ttl_s.
-- Returns 1 when it was booked; 0 when it was not (a mark stays, so that a reserve which lands late
-- books nothing); -1 when this router is not registered. O(1).
local function release(keys, args)
  if not redis.call('ZSCORE', keys[2], args[1]) then return -1 end
  local value = redis.call('HGET', keys[3], args[2])
  if value then
    if value == TOMBSTONE then return 0 end
    redis.call('HDEL', keys[3], args[2])
    return unbook(keys[1], args[1], args[2], value)
  end
  redis.call('HSET', keys[3], args[2], TOMBSTONE)
  redis.call('EXPIRE', keys[3], args[3])
  return 0
end

-- sync: make the ledger say what its router says, but for reservations on slots that have passed on,
-- and for prefills of which the sidecar has told here that they have ended.
-- The router sends no reserve and no release while this runs; what it has given up waiting for is
-- not in its list.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, reservations (31 bytes each:
-- request sequence, reservation, hash of the block it awaits or 8 zero bytes, context u32 or 0),
-- ttl_s, 1 to forget tombstones (else 0).
-- Returns {booked here, taken back}; {} when this router is not registered. O(reservations).
local function sync(keys, args)
  if not redis.call('ZSCORE', keys[2], args[1]) then return {} end
  local listed, context_of, added, taken = {}, {}, 0, 0
  for i = 1, #args[2], SYNC_ROW do
    local awaited = string.sub(args[2], i + 19, i + 26)
    context_of[string.sub(args[2], i, i + 7)] = struct.unpack('<I4', args[2], i + 27)
    listed[string.sub(args[2], i, i + 7)] = string.sub(args[2], i + 8, i + 18)
      .. (awaited == NO_BLOCK and '' or awaited)
  end
  local present = redis.call('HGETALL', keys[3])
  for i = 1, #present, 2 do
    local sequence, value = present[i], present[i + 1]
    if value == TOMBSTONE then
      if args[4] == '1' then redis.call('HDEL', keys[3], sequence) end
    elseif not listed[sequence] then
      redis.call('HDEL', keys[3], sequence)
      taken = taken + unbook(keys[1], args[1], sequence, value)
    elseif listed[sequence] == value or (string.byte(value, RESERVATION) == DECODE
      and string.sub(listed[sequence], 1, 6) == string.sub(value, 1, 6)) then
      listed[sequence] = nil
    else
      redis.call('HDEL', keys[3], sequence)  -- booked below as listed, or not at all
      unbook(keys[1], args[1], sequence, value)
    end
  end
  local joined = {}  -- slot -> tokens that join its queue and whose context is known, their pairs
  for sequence, value in pairs(listed) do
    local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
    if book(keys[1], slot, generation, 1, state == PREFILL and tokens or 0) then
      redis.call('HSET', keys[3], sequence, value)
      if state == PREFILL and tokens > 0 and context_of[sequence] > 0 then
        local sums = joined[slot] or {0, 0}
        joined[slot] = {sums[1] + tokens, sums[2] + tokens * context_of[sequence]}
      end
      if #value > RESERVATION then
        local awaited = awaited_key(keys[1], slot)
        redis.call('HSET', awaited, sequence .. args[1], string.sub(value, RESERVATION + 1))
        redis.call('EXPIRE', awaited, args[3])
      end
      added = added + 1
    end
  end
  for slot, sums in pairs(joined) do
    local queued = math.max(0, read_slot(keys[1], slot)[TOKENS] - sums[1])
    book_context(keys[1], nil, slot, queued, sums[1], math.floor(sums[2] / sums[1] + 0.5))
  end
  redis.call('EXPIRE', keys[3], args[3])
  return {added, taken}
end

-- reap: take back everything one dead or leaving router has reserved, exactly once.
-- KEYS[1] counters, KEYS[2] routers; ARGV ledger key prefix (its own tag), router id to end now, or
-- '' for whichever lease is dead.
-- Returns {router id, reservations taken back}, or {} when no lease is dead. O(reservations).
local function reap(keys, args)
  local router = args[2]
  if router == '' then
    local dead = redis.call('ZRANGEBYSCORE', keys[2], '-inf', string.format('%.6f', now_s()),
      'LIMIT', 0, 1)
    if #dead == 0 then return {} end
    router = dead[1]
  end
  local ledger = args[1] .. router
  -- A ledger whose registration was lost counts no longer: it may have been balanced away.
  local present = redis.call('ZSCORE', keys[2], router) and redis.call('HGETALL', ledger) or {}
  local taken = 0
  for i = 1, #present, 2 do
    taken = taken + unbook(keys[1], router, present[i], present[i + 1])
  end
  redis.call('DEL', ledger)
  redis.call('ZREM', keys[2], router)
  return {router, taken}
end

redis.register_function{function_name='ts1_read', callback=read, flags={'no-writes'}}
redis.register_function{function_name='ts1_register', callback=register, flags={'allow-oom'}}
redis.register_function{function_name='ts1_reserve', callback=reserve, flags={'allow-oom'}}
redis.register_function{function_name='ts1_prefilled', callback=prefilled, flags={'allow-oom'}}
redis.register_function{function_name='ts1_release', callback=release, flags={'allow-oom'}}
redis.register_function{function_name='ts1_sync', callback=sync, flags={'allow-oom'}}
redis.register_function{function_name='ts1_reap', callback=reap, flags={'allow-oom'}}
