#!lua name=ts1_upkeep
-- What keeps a fleet in order and Redis within its memory: the sweeper's lease, the directory, what
-- the index takes, and how much of it each instance may publish. All of it runs when memory is full,
-- because it is what makes room again; none of it grows with traffic.

local BUCKET_NUMBER, LIST_MAX = 4, 31
local SECTIONS = {'memory', 'server'}
-- A key's place in the server's table of keys, which MEMORY USAGE leaves out.
local PLACE_OF_KEY_BYTES = 16
-- Of the counters and of a reservation, as in fleet_v1.lua and reservations_v1.lua.
local HEADER, RECORD, CLAMPED, RESERVATION = 32, 64, 20, 11

-- list: keep a fleet in the directory.
-- KEYS[1] directory; ARGV fleet id, ttl_s. Returns 1. O(1).
local function list(keys, args)
  redis.call('SADD', keys[1], args[1])
  redis.call('EXPIRE', keys[1], args[2])
  return 1
end

-- lease: take or renew the mark of the one sidecar that sweeps, or give it up.
-- KEYS[1] sweeper; ARGV the caller's token, ttl_ms (0: give up).
-- Returns 1 when the mark is (was) the caller's, 0 while it is another's. O(1).
local function lease(keys, args)
  local holder = redis.call('GET', keys[1])
  if holder and holder ~= args[1] then return 0 end
  if tonumber(args[2]) > 0 then
    redis.call('SET', keys[1], args[1], 'PX', args[2])
  elseif holder then
    redis.call('DEL', keys[1])
  else
    return 0
  end
  return 1
end

-- budgets: how many blocks each instance may publish, in place of all that was said before.
-- KEYS[1] budgets; ARGV ttl_s, then slot, 'generation blocks', slot, 'generation blocks'...; none
-- lifts every limit. Returns how many. O(instances).
local function budgets(keys, args)
  redis.call('DEL', keys[1])
  for i = 2, #args, 2 do redis.call('HSET', keys[1], args[i], args[i + 1]) end
  if #args > 1 then redis.call('EXPIRE', keys[1], args[1]) end
  return (#args - 1) / 2
end

local ONES = {[0] = 0}
for k = 0, 7 do
  for rest = 0, 2 ^ k - 1 do ONES[2 ^ k + rest] = ONES[rest] + 1 end
end

local function holders_count(holders)
  if #holders <= LIST_MAX then return #holders end
  local count = 0
  for i = 1, #holders do count = count + ONES[string.byte(holders, i)] end
  return count
end

-- measure: what some buckets of a partition take, and what their server says of its memory.
-- KEYS[1] anchor; ARGV[1] numbers of the buckets (u32 each, little-endian), may be empty; ARGV[2]
-- blocks after which the rest of the buckets is left out.
-- Returns {buckets measured, bytes, blocks, holders of all those blocks, INFO}; INFO is '' where this
-- client may not ask for it. O(blocks).
local function measure(keys, args)
  local buckets, bytes, blocks, holders = 0, 0, 0, 0
  local blocks_max = tonumber(args[2])
  for i = 1, #args[1], BUCKET_NUMBER do
    if blocks >= blocks_max then break end
    buckets = buckets + 1
    local key = keys[1] .. ':' .. string.format('%d', struct.unpack('<I4', args[1], i))
    local values = redis.call('HVALS', key)
    if #values > 0 then
      bytes = bytes + PLACE_OF_KEY_BYTES + redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0)
    end
    blocks = blocks + #values
    for k = 1, #values do holders = holders + holders_count(values[k]) end
  end
  local info = {}
  for i = 1, #SECTIONS do
    local said = redis.pcall('INFO', SECTIONS[i])
    if type(said) == 'string' then info[#info + 1] = said end
  end
  return {buckets, bytes, blocks, holders, table.concat(info)}
end

-- What is reserved on each slot beyond (or short of) what the registered routers' ledgers say.
-- Returns slot -> {generation, flags, requests, tokens}, the counters, reservations, how many routers,
-- routers whose lease is dead, 1; the last is 0 when there are more reservations than may be looked
-- at, and then no slot is returned.
local function differences_of(keys, ledgers, reservations_max)
  local counters = redis.call('GET', keys[1]) or ''
  local t = redis.call('TIME')
  local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
  local slots, reservations, dead = {}, 0, 0
  local routers = redis.call('ZRANGE', keys[2], 0, -1, 'WITHSCORES')
  local booked = 0
  for i = 1, #routers, 2 do booked = booked + redis.call('HLEN', ledgers .. routers[i]) end
  if booked > reservations_max then return slots, counters, booked, #routers / 2, 0, 0 end
  for slot = 0, math.floor((#counters - HEADER) / RECORD) - 1 do
    slots[slot] = {struct.unpack('<I4I4I4I4', counters, HEADER + slot * RECORD + 1)}
  end
  for i = 1, #routers, 2 do
    if tonumber(routers[i + 1]) < now then dead = dead + 1 end
    local values = redis.call('HVALS', ledgers .. routers[i])
    for j = 1, #values do
      if #values[j] >= RESERVATION then
        local slot, generation, tokens, state = struct.unpack('<I2I4I4I1', values[j])
        local record = slots[slot]
        reservations = reservations + 1
        if record and record[1] == generation and record[2] ~= 0 then
          record[3] = record[3] - 1
          if state == 0 then record[4] = record[4] - tokens end
        end
      end
    end
  end
  return slots, counters, reservations, #routers / 2, dead, 1
end

-- audit: whether what is reserved on each slot is the sum of what the registered routers' ledgers say.
-- KEYS[1] counters, KEYS[2] routers; ARGV ledger key prefix (its own tag), reservations that may be
-- looked at.
-- Returns {differences: slot, generation, requests, tokens, slot...; reservations, routers, routers
-- whose lease is dead, how often a counter was kept from falling below zero, 1 or 0: whether it
-- looked}.
-- A difference is reserved minus ledgers. O(slots + reservations).
local function audit(keys, args)
  local slots, counters, reservations, routers, dead, looked =
    differences_of(keys, args[1], tonumber(args[2]))
  local differences = {}
  for slot = 0, #slots do
    local record = slots[slot]
    if record and (record[3] ~= 0 or record[4] ~= 0) then
      for _, value in ipairs({slot, record[1], record[3], record[4]}) do
        differences[#differences + 1] = value
      end
    end
  end
  local clamped = #counters >= HEADER and struct.unpack('<I4', counters, CLAMPED + 1) or 0
  return {differences, reservations, routers, dead, clamped, looked}
end

-- Forgets what no registered router's ledger awaits under that name; returns how much.
local function forget_awaited(key, keys, ledgers)
  local awaiting, forgotten = redis.call('HGETALL', key), 0
  for i = 1, #awaiting, 2 do
    local sequence, router = string.sub(awaiting[i], 1, 8), string.sub(awaiting[i], 9)
    local value = redis.call('ZSCORE', keys[2], router)
      and redis.call('HGET', ledgers .. router, sequence)
    if not value or string.sub(value, RESERVATION + 1) ~= awaiting[i + 1] then
      redis.call('HDEL', key, awaiting[i])
      forgotten = forgotten + 1
    end
  end
  return forgotten
end

-- balance: where an audit would tell a difference (a key was deleted by hand, evicted), reserve on
-- every slot what the registered routers' ledgers say.
-- KEYS[1] counters, KEYS[2] routers; ARGV ledger key prefix (its own tag), reservations that may be
-- looked at.
-- Returns {slots corrected, awaited blocks forgotten}. O(slots + reservations).
local function balance(keys, args)
  local slots, counters = differences_of(keys, args[1], tonumber(args[2]))
  local corrected, forgotten = 0, 0
  for slot = 0, #slots do
    local record = slots[slot]
    if record and (record[3] ~= 0 or record[4] ~= 0) then
      local at = HEADER + slot * RECORD + 8
      local requests, tokens = struct.unpack('<I4I4', counters, at + 1)
      redis.call('SETRANGE', keys[1], at,
        struct.pack('<I4I4', requests - record[3], tokens - record[4]))
      corrected = corrected + 1
    end
  end
  for slot = 0, corrected > 0 and #slots or -1 do
    forgotten = forgotten
      + forget_awaited(string.gsub(keys[1], 'counters$', 'w:') .. slot, keys, args[1])
  end
  return {corrected, forgotten}
end

redis.register_function{function_name='ts1_audit', callback=audit, flags={'no-writes'}}
redis.register_function{function_name='ts1_balance', callback=balance, flags={'allow-oom'}}
redis.register_function{function_name='ts1_list', callback=list, flags={'allow-oom'}}
redis.register_function{function_name='ts1_lease', callback=lease, flags={'allow-oom'}}
redis.register_function{function_name='ts1_budgets', callback=budgets, flags={'allow-oom'}}
redis.register_function{function_name='ts1_measure', callback=measure, flags={'no-writes'}}
