-- Heartbeats, and the ends of prefills that they tell: the third part of the library ts1_fleet.

local AWAITED_PER_HEARTBEAT_MAX, BLOCK_HASH = 1024, 8

-- await: the request's prefill will have ended when its instance has stored this block.
-- KEYS[1] counters, KEYS[2] routers, KEYS[3] ledger; ARGV router id, request sequence, block hash,
-- ttl_s.
-- Returns 1, or 0 when the request is not in prefill on a slot that still is what it was. O(1).
local function await(keys, args)
  local value = redis.call('HGET', keys[3], args[2])
  if not value or value == TOMBSTONE then return 0 end
  if not redis.call('ZSCORE', keys[2], args[1]) then return 0 end
  local slot, generation, _, state = struct.unpack(RESERVATION_FORMAT, value)
  local record = read_slot(keys[1], slot)
  if state ~= PREFILL or record[GENERATION] ~= generation or record[FLAGS] == 0 then return 0 end
  redis.call('HSET', keys[3], args[2], string.sub(value, 1, RESERVATION) .. args[3])
  local awaited = awaited_key(keys[1], slot)
  redis.call('HSET', awaited, args[2] .. args[1], args[3])
  redis.call('EXPIRE', awaited, args[4])
  return 1
end

-- Of a key of another type than it is to have, which is deleted: nothing.
local function read_or_delete(command, key, ...)
  local value = redis.pcall(command, key, ...)
  if type(value) ~= 'table' or not value.err then return value end
  redis.call('DEL', key)
  return nil
end

-- Ends the prefills of a slot whose awaited blocks the engine has stored.
-- Returns how many tokens they were, how many of them, and the distinct hashes still awaited.
local function take_computed(key, ledgers, stored, slot, generation)
  local size = read_or_delete('HLEN', key) or 0
  if size == 0 then return 0, 0, '' end
  local found, named, left, tokens, ended = {}, {}, {}, 0, 0
  for i = 1, #stored, BLOCK_HASH do found[string.sub(stored, i, i + BLOCK_HASH - 1)] = true end
  local routers = string.gsub(ledgers, 'ledger:$', 'routers')
  local awaiting = size <= AWAITED_PER_HEARTBEAT_MAX and redis.call('HGETALL', key)
    or redis.call('HRANDFIELD', key, AWAITED_PER_HEARTBEAT_MAX, 'WITHVALUES')
  for i = 1, #awaiting, 2 do
    local who, block = awaiting[i], awaiting[i + 1]
    if found[block] or #block ~= BLOCK_HASH then
      redis.call('HDEL', key, who)
      local sequence, router = string.sub(who, 1, 8), string.sub(who, 9)
      local ledger = ledgers .. router
      local value = redis.call('ZSCORE', routers, router) and read_or_delete('HGET', ledger, sequence)
      if value and string.sub(value, RESERVATION + 1) == block then
        local booked_slot, booked_generation, queued = struct.unpack(RESERVATION_FORMAT, value)
        if booked_slot == slot and booked_generation == generation then
          redis.call('HSET', ledger, sequence,
            struct.pack(RESERVATION_FORMAT, slot, generation, 0, DECODE))
          tokens, ended = tokens + queued, ended + 1
        end
      end
    elseif not named[block] then
      named[block] = true
      left[#left + 1] = block
    end
  end
  return tokens, ended, table.concat(left)
end

-- heartbeat: renew an instance's lease, publish its counters, take what waits for its sidecar.
-- KEYS[1] fleet, KEYS[2] counters, KEYS[3] instances, KEYS[4] notices, KEYS[5] budgets, KEYS[6]
-- what is awaited on the slot; ARGV slot, generation, epoch (8 bytes), lease_ttl_s, ttl_s, state
-- flags (DRAINING, SLEEPING), index blocks, completeness in millionths, ledger key prefix, hashes of
-- awaited blocks that the engine has stored, Redis time at which all this was true or '', then running, waiting, KV$ usage in millionths (absent
-- when the engine's metrics are not known).
-- Returns {reserved requests, reserved prefill tokens, budget in blocks or -1, seconds,
-- microseconds, {notices}, hashes still awaited, prefills ended, instances of the fleet}, or {}
-- when the slot is no longer this instance's: it must join again and publish its whole table; or
-- {seconds, microseconds} and nothing is renewed when what it tells was true more than a lease ago:
-- the sidecar stood still on the way, and the lease of what it knows has ended.
-- O(notices + awaited), at most NOTICES_PER_SLOT_MAX and AWAITED_PER_HEARTBEAT_MAX.
local function heartbeat(keys, args)
  local slot, generation = tonumber(args[1]), tonumber(args[2])
  if redis.call('HGET', keys[1], 'epoch') ~= args[3] then return {} end
  local record = read_slot(keys[2], slot)
  if record[GENERATION] ~= generation or record[FLAGS] == 0
    or bit.band(record[FLAGS], CLOSING) ~= 0 then return {} end
  local notices = read_or_delete('LRANGE', keys[4], 0, -1) or {}
  local told = read_or_delete('HGET', keys[5], args[1]) or ''
  local t = redis.call('TIME')
  local now = now_s()
  if args[11] ~= '' and now - tonumber(args[11]) > tonumber(args[4]) then return {t[1], t[2]} end
  record[FLAGS] = bit.bor(USED, tonumber(args[6]))
  record[LEASE] = now + tonumber(args[4])
  record[INDEX_BLOCKS], record[COMPLETENESS] = tonumber(args[7]), tonumber(args[8])
  local computed, ended, awaited = take_computed(keys[6], args[9], args[10], slot, generation)
  if computed > record[TOKENS] then count_clamped(keys[2]) end
  record[TOKENS] = math.max(0, record[TOKENS] - computed)
  if args[12] then
    record[RUNNING], record[WAITING] = tonumber(args[12]), tonumber(args[13])
    record[KV_USAGE] = tonumber(args[14])
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
  local fleet_instances = redis.call('HLEN', keys[3])
  return {record[REQUESTS], record[TOKENS], budget, t[1], t[2], notices, awaited, ended,
    fleet_instances}
end

redis.register_function{function_name='ts1_await', callback=await, flags={'allow-oom'}}
redis.register_function{function_name='ts1_heartbeat', callback=heartbeat, flags={'allow-oom'}}
