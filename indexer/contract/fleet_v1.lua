#!lua name=ts1_fleet
-- Membership and counters of one fleet; reservations follow in reservations_v1.lua, which is loaded
-- as the second half of this library. Times are Redis's own.
--
-- Counters: 32-byte header and one 64-byte record per slot, laid out as in records.py.

local HEADER, RECORD = 32, 64
local RECORD_FORMAT = '<I4I4I4I4I4I4I4I4I4I4I4I4dd'
local GENERATION, FLAGS, REQUESTS, TOKENS, PEAK, FOREIGN = 1, 2, 3, 4, 5, 6
local RUNNING, WAITING, KV_USAGE, INDEX_BLOCKS, COMPLETENESS, LAST_RESERVED = 7, 8, 9, 10, 11, 12
local LEASE, PUBLISHED, FIELDS = 13, 14, 14
local USED, CLOSING, DRAINING, SLEEPING = 1, 2, 4, 8

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

-- Ends the use of a slot until it is swept; 0 when it has passed to another generation or is free.
local function close_slot(counters, slot, generation)
  local record = read_slot(counters, slot)
  if record[GENERATION] ~= generation or record[FLAGS] == 0 then return 0 end
  if bit.band(record[FLAGS], CLOSING) == 0 then
    record[FLAGS] = bit.bor(record[FLAGS], CLOSING)
    record[LEASE] = 0
    write_slot(counters, slot, record)
    membership_changed(counters)
  end
  return 1
end

-- create: found the fleet, or tell what it is. The first caller fixes the shape.
-- KEYS[1] fleet, KEYS[2] counters, KEYS[3] instances; ARGV model scope, block size, partitions,
-- bucket bits, epoch (8 bytes, drawn by the caller), ttl_s.
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
    if keys[3] then redis.call('DEL', keys[3]) end  -- without its counters none of them has a slot
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
-- slots a partition, then slot and generation that are given up for it (absent: none).
-- Returns {slot, generation}, or {} when every slot is taken or waits to be swept. O(slots).
local function join(keys, args)
  local partitions = tonumber(redis.call('HGET', keys[1], 'partitions') or '0')
  local per_partition = tonumber(args[4])
  if args[5] then close_slot(keys[2], tonumber(args[5]), tonumber(args[6])) end
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

-- Of a key of another type than it is to have, which is deleted: nothing.
local function read_or_delete(command, key, ...)
  local value = redis.pcall(command, key, ...)
  if type(value) ~= 'table' or not value.err then return value end
  redis.call('DEL', key)
  return nil
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
  local notices = read_or_delete('LRANGE', keys[4], 0, -1) or {}
  local told = read_or_delete('HGET', keys[5], args[1]) or ''
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
  if #notices > 0 then redis.call('DEL', keys[4]) end
  local of, blocks = string.match(told, '^(%d+) (%d+)$')
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
  if grace >= 0 and record[LEASE] + grace >= now_s() then return 0 end
  return close_slot(keys[1], slot, tonumber(args[2]))
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

-- Membership is bounded by the number of slots and has to go on when memory is full.
redis.register_function{function_name='ts1_create', callback=create, flags={'allow-oom'}}
redis.register_function{function_name='ts1_join', callback=join, flags={'allow-oom'}}
redis.register_function{function_name='ts1_heartbeat', callback=heartbeat, flags={'allow-oom'}}
redis.register_function{function_name='ts1_notice', callback=notice}
redis.register_function{function_name='ts1_announce', callback=announce, flags={'allow-oom'}}
redis.register_function{function_name='ts1_close', callback=close, flags={'allow-oom'}}
redis.register_function{function_name='ts1_free', callback=free, flags={'allow-oom'}}
