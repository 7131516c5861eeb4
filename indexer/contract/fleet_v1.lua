#!lua name=ts1_fleet
-- Membership and counters of one fleet; reservations_v1.lua and heartbeat_v1.lua follow, loaded as
-- the other parts of this library. Times are Redis's own.
--
-- Counters: 32-byte header and one 64-byte record per slot, laid out as in records.py.

local HEADER, RECORD, CLAMPED = 32, 64, 20
local RECORD_FORMAT = '<I4I4I4I4I4I4I4I4I4I4I4I4dd'
local GENERATION, FLAGS, REQUESTS, TOKENS, PEAK, FOREIGN = 1, 2, 3, 4, 5, 6
local RUNNING, WAITING, KV_USAGE, INDEX_BLOCKS, COMPLETENESS, LAST_RESERVED = 7, 8, 9, 10, 11, 12
local LEASE, PUBLISHED, FIELDS = 13, 14, 14
local RESERVATION = 11  -- bytes; a longer one awaits a block
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

-- A counter would have fallen below zero: something was taken back twice.
local function count_clamped(counters)
  local raw = redis.call('GETRANGE', counters, CLAMPED, CLAMPED + 3)
  redis.call('SETRANGE', counters, CLAMPED, struct.pack('<I4', (struct.unpack('<I4', raw) + 1) % 2 ^ 32))
end

-- Key of what requests await on a slot (reservations_v1.lua), beside the counters' own.
local function awaited_key(counters, slot)
  return string.gsub(counters, 'counters$', 'w:') .. slot
end

-- Ends all registrations: ledgers say nothing about counters that begin anew. Routers find themselves
-- lost, register and send their books.
local function forget_routers(counters)
  local routers = string.gsub(counters, 'counters$', 'routers')
  local prefix = string.gsub(counters, 'counters$', 'ledger:')
  local ids = redis.call('ZRANGE', routers, 0, -1)
  for i = 1, #ids do
    local values = redis.call('HVALS', prefix .. ids[i])
    for j = 1, #values do
      if #values[j] > RESERVATION then
        redis.call('DEL', awaited_key(counters, struct.unpack('<I2', values[j])))
      end
    end
    redis.call('DEL', prefix .. ids[i])
  end
  redis.call('DEL', routers)
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
-- bucket bits, epoch (8 bytes, drawn by the caller for this call), ttl_s.
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
    forget_routers(keys[2])
    -- Membership goes on from what was drawn: counted from one it could come, within an epoch, to the
    -- same number with other instances, and routers would keep the former ones.
    redis.call('SETRANGE', keys[2], 0,
      'TS1\0' .. string.sub(args[5], 1, 4) .. fleet[5] .. struct.pack('<I4', tonumber(fleet[3]))
      .. string.rep('\0', 12))
  end
  redis.call('EXPIRE', keys[1], args[6])
  redis.call('EXPIRE', keys[2], args[6])
  return fleet
end

-- join: take the lowest free slot of the emptiest partition.
-- KEYS[1] fleet, KEYS[2] counters, KEYS[3] instances; ARGV instance record, lease_ttl_s, ttl_s,
-- slots a partition, state flags (0: takes requests at once), then slot and generation that are
-- given up for it (absent: none).
-- Returns {slot, generation}, or {} when every slot is taken or waits to be swept. O(slots).
local function join(keys, args)
  local partitions = tonumber(redis.call('HGET', keys[1], 'partitions') or '0')
  local per_partition = tonumber(args[4])
  if args[6] then close_slot(keys[2], tonumber(args[6]), tonumber(args[7])) end
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
  record[GENERATION] = generation
  record[FLAGS] = bit.bor(USED, bit.band(tonumber(args[5]), bit.bor(DRAINING, SLEEPING)))
  record[LEASE] = now_s() + tonumber(args[2])
  write_slot(keys[2], best, record)
  redis.call('HSET', keys[3], best, args[1])
  redis.call('DEL', awaited_key(keys[2], best))
  membership_changed(keys[2])
  for i = 1, 3 do redis.call('EXPIRE', keys[i], args[3]) end
  return {best, generation}
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
  redis.call('DEL', awaited_key(keys[1], slot))
  membership_changed(keys[1])
  return 1
end

-- Membership is bounded by the number of slots and has to go on when memory is full.
redis.register_function{function_name='ts1_create', callback=create, flags={'allow-oom'}}
redis.register_function{function_name='ts1_join', callback=join, flags={'allow-oom'}}
redis.register_function{function_name='ts1_notice', callback=notice}
redis.register_function{function_name='ts1_announce', callback=announce, flags={'allow-oom'}}
redis.register_function{function_name='ts1_close', callback=close, flags={'allow-oom'}}
redis.register_function{function_name='ts1_free', callback=free, flags={'allow-oom'}}
