#!lua name=ts1_upkeep
-- What keeps a fleet in order and Redis within its memory: the sweeper's lease, the directory, what
-- the index takes, and how much of it each instance may publish. All of it runs when memory is full,
-- because it is what makes room again; none of it grows with traffic.

local BUCKET_NUMBER, LIST_MAX = 4, 31
local SECTIONS = {'memory', 'server'}
-- A key's place in the server's table of keys, which MEMORY USAGE leaves out.
local PLACE_OF_KEY_BYTES = 16

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

redis.register_function{function_name='ts1_list', callback=list, flags={'allow-oom'}}
redis.register_function{function_name='ts1_lease', callback=lease, flags={'allow-oom'}}
redis.register_function{function_name='ts1_budgets', callback=budgets, flags={'allow-oom'}}
redis.register_function{function_name='ts1_measure', callback=measure, flags={'no-writes'}}
