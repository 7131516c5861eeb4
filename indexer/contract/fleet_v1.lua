#!lua name=ts1_fleet
-- Membership, counters and reservations of one fleet. Times are Redis's own.
--
-- Counters: 32-byte header and one 64-byte record per slot, laid out as in records.py.
-- Ledger:   HASH of one router registration, request sequence (8 bytes) -> reservation (11 bytes:
--           slot u16, generation u32, prefill tokens u32, state u8), or 'x' where a release came
--           before its reserve.

local HEADER, RECORD = 32, 64
local RECORD_FORMAT = '<I4I4I4I4I4I4I4I4I4I4I4I4dd'
local GENERATION, FLAGS, REQUESTS, TOKENS, PEAK, FOREIGN = 1, 2, 3, 4, 5, 6
local RUNNING, WAITING, KV_USAGE, INDEX_BLOCKS, COMPLETENESS, LAST_RESERVED = 7, 8, 9, 10, 11, 12
local LEASE, PUBLISHED, FIELDS = 13, 14, 14
local USED, CLOSING, DRAINING, SLEEPING = 1, 2, 4, 8
local RESERVATION_FORMAT, PREFILL, DECODE = '<I2I4I4I1', 0, 1
local CANDIDATE = 10
local TOMBSTONE = 'x'

local function now_s()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

local function read_slot(counters, slot)
  local offset = HEADER + slot * RECORD
  local raw = redis.call('GETRANGE', counters, offset, offset + RECORD - 1)
  if #raw < RECORD then raw = raw .. string.rep('\0', RECORD - #raw) end
  return {struct.unpack(RECORD_FORMAT, raw)}
end

local function write_slot(counters, slot, record)
  redis.call('SETRANGE', counters, HEADER + slot * RECORD,
    struct.pack(RECORD_FORMAT, unpack(record, 1, FIELDS)))
end

local function membership_changed(counters)
  local now = struct.unpack('<I4', redis.call('GETRANGE', counters, 4, 7))
  redis.call('SETRANGE', counters, 4, struct.pack('<I4', (now + 1) % 4294967296))
end

local function open_for(record, generation, now)
  return record[GENERATION] == generation and record[FLAGS] == USED and record[LEASE] >= now
end

-- Adds to (or with negative numbers takes from) what is reserved on a slot, unless the slot has
-- passed to another generation or is free (false). Never below zero.
local function book(counters, slot, generation, requests, tokens)
  local record = read_slot(counters, slot)
  if record[GENERATION] ~= generation or record[FLAGS] == 0 then return false end
  record[REQUESTS] = math.max(0, record[REQUESTS] + requests)
  record[TOKENS] = math.max(0, record[TOKENS] + tokens)
  record[PEAK] = math.max(record[PEAK], record[REQUESTS])
  write_slot(counters, slot, record)
  return true
end

-- Takes one reservation value off the counters, whatever of it is still booked.
local function unbook(counters, value)
  if value == TOMBSTONE then return 0 end
  local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
  book(counters, slot, generation, -1, state == PREFILL and -tokens or 0)
  return 1
end

-- create: found the fleet, or tell what it is. The first caller fixes the shape.
-- KEYS[1] fleet, KEYS[2] counters; ARGV model scope, block size, partitions, bucket bits,
-- epoch (8 bytes, drawn by the caller), ttl_s.
-- Returns {model scope, block size, partitions, bucket bits, epoch}. O(1).
local function create(keys, args)
  if redis.call('EXISTS', keys[1]) == 0 then
    redis.call('HSET', keys[1], 'model_scope', args[1], 'block_size_tokens', args[2],
      'partitions', args[3], 'bucket_bits', args[4], 'epoch', args[5])
    redis.call('DEL', keys[2])
  end
  local fleet = redis.call('HMGET', keys[1], 'model_scope', 'block_size_tokens', 'partitions',
    'bucket_bits', 'epoch')
  if redis.call('EXISTS', keys[2]) == 0 then
    redis.call('SETRANGE', keys[2], 0,
      'TS1\0' .. struct.pack('<I4', 1) .. fleet[5] .. struct.pack('<I4', tonumber(fleet[3]))
      .. string.rep('\0', 12))
  end
  redis.call('EXPIRE', keys[1], args[6])
  redis.call('EXPIRE', keys[2], args[6])
  return fleet
end

-- join: take the lowest free slot of the emptiest partition.
-- KEYS[1] fleet, KEYS[2] counters, KEYS[3] instances; ARGV instance record, lease_ttl_s, ttl_s,
-- slots a partition.
-- Returns {slot, generation}, or {} when every slot is taken or waits to be swept. O(slots).
local function join(keys, args)
  local partitions = tonumber(redis.call('HGET', keys[1], 'partitions') or '0')
  local per_partition = tonumber(args[4])
  local raw = redis.call('GET', keys[2]) or ''
  local best, best_used = nil, nil
  for p = 0, partitions - 1 do
    local used, free = 0, nil
    for i = 0, per_partition - 1 do
      local at = HEADER + (p * per_partition + i) * RECORD
      local flags = #raw >= at + 8 and struct.unpack('<I4', raw, at + 5) or 0
      if flags ~= 0 then used = used + 1 elseif free == nil then free = p * per_partition + i end
    end
    if free ~= nil and (best == nil or used < best_used) then best, best_used = free, used end
  end
  if best == nil then return {} end
  local record = read_slot(keys[2], best)
  local generation = record[GENERATION] % 4294967295 + 1
  for i = 1, FIELDS do record[i] = 0 end
  record[GENERATION], record[FLAGS] = generation, USED
  record[LEASE] = now_s() + tonumber(args[2])
  write_slot(keys[2], best, record)
  redis.call('HSET', keys[3], best, args[1])
  membership_changed(keys[2])
  for i = 1, 3 do redis.call('EXPIRE', keys[i], args[3]) end
  return {best, generation}
end

-- heartbeat: renew an instance's lease, publish its counters, take what waits for its sidecar.
-- KEYS[1] fleet, KEYS[2] counters, KEYS[3] instances, KEYS[4] notices, KEYS[5] budgets; ARGV slot,
-- generation, epoch (8 bytes), lease_ttl_s, ttl_s, state flags (DRAINING, SLEEPING), index blocks,
-- completeness in millionths, then running, waiting, KV$ usage in millionths (absent when the
-- engine's metrics are not known).
-- Returns {reserved requests, reserved prefill tokens, budget in blocks or -1, seconds,
-- microseconds, {notices}}, or {} when the slot is no longer this instance's: it must join again and
-- publish its whole table. O(notices), at most NOTICES_PER_SLOT_MAX.
local function heartbeat(keys, args)
  local slot, generation = tonumber(args[1]), tonumber(args[2])
  if redis.call('HGET', keys[1], 'epoch') ~= args[3] then return {} end
  local record = read_slot(keys[2], slot)
  if record[GENERATION] ~= generation or record[FLAGS] == 0
    or bit.band(record[FLAGS], CLOSING) ~= 0 then return {} end
  local now = now_s()
  record[FLAGS] = bit.bor(USED, tonumber(args[6]))
  record[LEASE] = now + tonumber(args[4])
  record[INDEX_BLOCKS], record[COMPLETENESS] = tonumber(args[7]), tonumber(args[8])
  if args[9] then
    record[RUNNING], record[WAITING] = tonumber(args[9]), tonumber(args[10])
    record[KV_USAGE] = tonumber(args[11])
    -- A request that ended since the engine counted it was reserved at some moment since the last
    -- heartbeat: the peak keeps it from being taken for somebody else's.
    record[FOREIGN] = math.max(0, record[RUNNING] + record[WAITING] - record[PEAK])
    record[PEAK] = record[REQUESTS]
    record[PUBLISHED] = now
  end
  write_slot(keys[2], slot, record)
  for i = 1, 3 do redis.call('EXPIRE', keys[i], args[5]) end
  local notices = redis.call('LRANGE', keys[4], 0, -1)
  if #notices > 0 then redis.call('DEL', keys[4]) end
  local of, blocks = string.match(redis.call('HGET', keys[5], args[1]) or '', '^(%d+) (%d+)$')
  local budget = tonumber(of) == generation and tonumber(blocks) or -1
  local t = redis.call('TIME')
  return {record[REQUESTS], record[TOKENS], budget, t[1], t[2], notices}
end

-- notice: tell a slot's sidecar that its engine had more or less than the index said.
-- KEYS[1] counters, KEYS[2] notices; ARGV slot, generation, packed notice, how many are kept, ttl_s.
-- Returns 1, or 0 when the slot has passed on. O(1).
local function notice(keys, args)
  local record = read_slot(keys[1], tonumber(args[1]))
  if record[GENERATION] ~= tonumber(args[2]) or record[FLAGS] == 0 then return 0 end
  redis.call('RPUSH', keys[2], args[3])
  redis.call('LTRIM', keys[2], -tonumber(args[4]), -1)
  redis.call('EXPIRE', keys[2], args[5])
  return 1
end

-- announce: replace an instance's record (adapters loaded, URL changed).
-- KEYS[1] counters, KEYS[2] instances; ARGV slot, generation, record. Returns 1, or 0 when not its.
local function announce(keys, args)
  local record = read_slot(keys[1], tonumber(args[1]))
  if record[GENERATION] ~= tonumber(args[2]) or record[FLAGS] == 0 then return 0 end
  redis.call('HSET', keys[2], args[1], args[3])
  membership_changed(keys[1])
  return 1
end

-- close: stop using a slot, so that it can be swept: its own sidecar leaves (grace_s = -1), or its
-- lease has been dead for grace_s.
-- KEYS[1] counters; ARGV slot, generation, grace_s. Returns 1 when the slot is closing. O(1).
local function close(keys, args)
  local slot, grace = tonumber(args[1]), tonumber(args[3])
  local record = read_slot(keys[1], slot)
  if record[GENERATION] ~= tonumber(args[2]) or record[FLAGS] == 0 then return 0 end
  if bit.band(record[FLAGS], CLOSING) ~= 0 then return 1 end
  if grace >= 0 and record[LEASE] + grace >= now_s() then return 0 end
  record[FLAGS] = bit.bor(record[FLAGS], CLOSING)
  record[LEASE] = 0
  write_slot(keys[1], slot, record)
  membership_changed(keys[1])
  return 1
end

-- free: hand a closed and swept slot out again. Its generation stays, so late releases of
-- reservations on it change nothing.
-- KEYS[1] counters, KEYS[2] instances; ARGV slot, generation. Returns 1, or 0 when it is not closing.
local function free(keys, args)
  local slot = tonumber(args[1])
  local record = read_slot(keys[1], slot)
  if record[GENERATION] ~= tonumber(args[2]) or bit.band(record[FLAGS], CLOSING) == 0 then
    return 0
  end
  local generation = record[GENERATION]
  for i = 1, FIELDS do record[i] = 0 end
  record[GENERATION] = generation
  write_slot(keys[1], slot, record)
  redis.call('HDEL', keys[2], args[1])
  membership_changed(keys[1])
  return 1
end

-- read: the counters of the whole fleet.
-- KEYS[1] counters. Returns {seconds, microseconds, counters}; counters '' when there is no fleet.
local function read(keys, _)
  local t = redis.call('TIME')
  return {t[1], t[2], redis.call('GET', keys[1]) or ''}
end

-- register: begin or renew a router's lease.
-- KEYS[1] routers, KEYS[2] ledger; ARGV router id, lease_ttl_s, ttl_s, 1 to begin or 0 to renew.
-- Returns 1, or 0 when the lease to renew has been reaped or lost: register anew under another id.
local function register(keys, args)
  if args[4] == '0' and not redis.call('ZSCORE', keys[1], args[1]) then return 0 end
  redis.call('ZADD', keys[1], now_s() + tonumber(args[2]), args[1])
  redis.call('EXPIRE', keys[1], args[3])
  redis.call('EXPIRE', keys[2], args[3])
  return 1
end

-- reserve: choose an instance with the counters of this very moment and book the request on it.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence (8 bytes),
-- candidates (10 bytes each: slot u16, generation u32, new prefill tokens u32; equals come in the
-- order of preference), choice: -1 = the least (queued + new prefill tokens) x (batch size + 1),
-- ties by fewer new prefill tokens, then fewer requests, then order; else the index of the only
-- acceptable candidate, and then: its batch size when it was chosen, or -1 for whatever it is by now.
-- Returns {status, index, counters of all candidates (8 bytes each: queued prefill tokens u32, batch
-- size u32, before this reservation)}; status 'ok', 'moved' (the choice has another batch size
-- by now: score again), 'gone' (no candidate is open), 'lost' (this router is not registered), 'late'
-- (released before it was reserved). A repeat of a booked sequence is 'ok' and books nothing.
-- Cost: O(candidates), at most CANDIDATES_PER_RESERVE_MAX.
local function reserve(keys, args)
  local counters, sequence, candidates = keys[1], args[2], args[3]
  local choice, expected = tonumber(args[4]), tonumber(args[5])
  if not redis.call('ZSCORE', keys[2], args[1]) then return {'lost', -1, ''} end
  local booked = redis.call('HGET', keys[3], sequence)
  if booked == TOMBSTONE then return {'late', -1, ''} end
  local now = now_s()
  local booked_slot = booked and struct.unpack('<I2', booked)
  local best, best_score, best_new, best_batch, best_record
  local states = {}
  for i = 0, #candidates / CANDIDATE - 1 do
    local slot, generation, new = struct.unpack('<I2I4I4', candidates, i * CANDIDATE + 1)
    local record = read_slot(counters, slot)
    local queued, batch = record[TOKENS], record[REQUESTS] + record[FOREIGN]
    states[#states + 1] = struct.pack('<I4I4', queued, batch)
    if booked_slot == slot then return {'ok', i, ''} end
    if open_for(record, generation, now) and (choice == -1 or choice == i) then
      local score = (queued + new) * (batch + 1)
      if best == nil or score < best_score or (score == best_score
        and (new < best_new or (new == best_new and batch < best_batch))) then
        best, best_score, best_new, best_batch, best_record = i, score, new, batch, record
      end
    end
  end
  states = table.concat(states)
  if best == nil then return {'gone', -1, states} end
  if expected >= 0 and best_batch ~= expected then return {'moved', best, states} end
  local slot, generation, new = struct.unpack('<I2I4I4', candidates, best * CANDIDATE + 1)
  redis.call('HSET', keys[3], sequence,
    struct.pack(RESERVATION_FORMAT, slot, generation, new, PREFILL))
  best_record[REQUESTS] = best_record[REQUESTS] + 1
  best_record[TOKENS] = best_record[TOKENS] + new
  best_record[PEAK] = math.max(best_record[PEAK], best_record[REQUESTS])
  best_record[LAST_RESERVED] = math.floor(now)
  write_slot(counters, slot, best_record)
  return {'ok', best, states}
end

-- prefilled: the request's prefill has ended; its tokens are no longer queued.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence.
-- Returns 1, or 0 when there was nothing (left) to take. O(1).
local function prefilled(keys, args)
  local value = redis.call('HGET', keys[3], args[2])
  if not value or value == TOMBSTONE then return 0 end
  local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
  if state ~= PREFILL then return 0 end
  book(keys[1], slot, generation, 0, -tokens)
  redis.call('HSET', keys[3], args[2], struct.pack(RESERVATION_FORMAT, slot, generation, 0, DECODE))
  return 1
end

-- release: the request has ended, however it ended.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence, ttl_s.
-- Returns 1 when it was booked; 0 when it was not (a mark stays, so that a reserve which lands late
-- books nothing); -1 when this router is not registered. O(1).
local function release(keys, args)
  local value = redis.call('HGET', keys[3], args[2])
  if value then
    if value == TOMBSTONE then return 0 end
    redis.call('HDEL', keys[3], args[2])
    return unbook(keys[1], value)
  end
  if not redis.call('ZSCORE', keys[2], args[1]) then return -1 end
  redis.call('HSET', keys[3], args[2], TOMBSTONE)
  redis.call('EXPIRE', keys[3], args[3])
  return 0
end

-- sync: make the ledger say what its router says, but for reservations on slots that have passed on.
-- The router sends no reserve and no release while this runs; what it has given up waiting for is
-- not in its list.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, reservations (19 bytes each:
-- request sequence, reservation), ttl_s, 1 to forget tombstones (else 0).
-- Returns {booked here, taken back}; {} when this router is not registered. O(reservations).
local function sync(keys, args)
  if not redis.call('ZSCORE', keys[2], args[1]) then return {} end
  local listed, added, taken = {}, 0, 0
  for i = 1, #args[2], 19 do
    listed[string.sub(args[2], i, i + 7)] = string.sub(args[2], i + 8, i + 18)
  end
  local present = redis.call('HGETALL', keys[3])
  for i = 1, #present, 2 do
    local sequence, value = present[i], present[i + 1]
    if value == TOMBSTONE then
      if args[4] == '1' then redis.call('HDEL', keys[3], sequence) end
    elseif not listed[sequence] then
      redis.call('HDEL', keys[3], sequence)
      taken = taken + unbook(keys[1], value)
    elseif listed[sequence] == value then
      listed[sequence] = nil
    else
      unbook(keys[1], value)
    end
  end
  for sequence, value in pairs(listed) do
    local slot, generation, tokens, state = struct.unpack(RESERVATION_FORMAT, value)
    if book(keys[1], slot, generation, 1, state == PREFILL and tokens or 0) then
      redis.call('HSET', keys[3], sequence, value)
      added = added + 1
    end
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
  local values = redis.call('HVALS', ledger)
  local taken = 0
  for i = 1, #values do taken = taken + unbook(keys[1], values[i]) end
  redis.call('DEL', ledger)
  redis.call('ZREM', keys[2], router)
  return {router, taken}
end

redis.register_function{function_name='ts1_create', callback=create}
redis.register_function{function_name='ts1_join', callback=join}
redis.register_function{function_name='ts1_heartbeat', callback=heartbeat, flags={'allow-oom'}}
redis.register_function{function_name='ts1_notice', callback=notice}
redis.register_function{function_name='ts1_announce', callback=announce}
redis.register_function{function_name='ts1_close', callback=close, flags={'allow-oom'}}
redis.register_function{function_name='ts1_free', callback=free, flags={'allow-oom'}}
redis.register_function{function_name='ts1_read', callback=read, flags={'no-writes'}}
redis.register_function{function_name='ts1_register', callback=register, flags={'allow-oom'}}
redis.register_function{function_name='ts1_reserve', callback=reserve, flags={'allow-oom'}}
redis.register_function{function_name='ts1_prefilled', callback=prefilled, flags={'allow-oom'}}
redis.register_function{function_name='ts1_release', callback=release, flags={'allow-oom'}}
redis.register_function{function_name='ts1_sync', callback=sync, flags={'allow-oom'}}
redis.register_function{function_name='ts1_reap', callback=reap, flags={'allow-oom'}}
