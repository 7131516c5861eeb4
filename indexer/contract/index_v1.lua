#!lua name=ts1_index
-- The prefix-block index of one partition.
--
-- Anchor key KEYS[1] = keys.partition(): HASH, local slot -> generation that may write.
-- Bucket key         = KEYS[1] .. ':' .. b, b = first `bits` bits of the block hash: HASH,
--                      block hash (8 bytes) -> holders.
-- Every key expires: set by whoever makes it, renewed by the sweeper's keep.
-- Holders            = up to 31 local slots as sorted bytes, or a 32-byte bitmap (bit 0 of byte 0 is
--                      slot 0) for more; canonical, so equal sets are equal strings.

local HASH = 8
local LIST_MAX = 31
local STRIDE = 4  -- between positions read first; fewer reads than by doubling, as few when it divides

local function bucket_divisor(bits)
  return 2 ^ (32 - tonumber(bits))
end

local function bucket_key(prefix, hash, divisor)
  return prefix .. string.format('%d', math.floor(struct.unpack('>I4', hash) / divisor))
end

local function holders_add(holders, slot)
  if #holders <= LIST_MAX then
    local at = #holders + 1
    for i = 1, #holders do
      local held = string.byte(holders, i)
      if held == slot then return holders end
      if held > slot then at = i break end
    end
    local list = string.sub(holders, 1, at - 1) .. string.char(slot) .. string.sub(holders, at)
    if #list <= LIST_MAX then return list end
    local bytes = {}
    for i = 1, 32 do bytes[i] = 0 end
    for i = 1, #list do
      local held = string.byte(list, i)
      local k = math.floor(held / 8) + 1
      bytes[k] = bit.bor(bytes[k], bit.lshift(1, held % 8))
    end
    return string.char(unpack(bytes))
  end
  local k = math.floor(slot / 8) + 1
  local byte = bit.bor(string.byte(holders, k), bit.lshift(1, slot % 8))
  return string.sub(holders, 1, k - 1) .. string.char(byte) .. string.sub(holders, k + 1)
end

local function holders_remove(holders, slot)
  if #holders <= LIST_MAX then
    for i = 1, #holders do
      if string.byte(holders, i) == slot then
        return string.sub(holders, 1, i - 1) .. string.sub(holders, i + 1)
      end
    end
    return holders
  end
  local list = {}
  for i = 0, 255 do
    local byte = string.byte(holders, math.floor(i / 8) + 1)
    if i ~= slot and bit.band(byte, bit.lshift(1, i % 8)) ~= 0 then list[#list + 1] = i end
  end
  if #list <= LIST_MAX then return string.char(unpack(list)) end
  local k = math.floor(slot / 8) + 1
  local byte = bit.band(string.byte(holders, k), bit.bnot(bit.lshift(1, slot % 8)))
  return string.sub(holders, 1, k - 1) .. string.char(byte) .. string.sub(holders, k + 1)
end

-- lookups: how many leading blocks of a chain each instance of some partitions holds.
-- KEYS their anchors; ARGV[1] bucket bits, ARGV[2] hashes of the chain, concatenated.
-- Returns for each partition {depth, holders, depth, holders, ...} by rising depth: the holders whose
-- depth is at least that; the sets are nested because the published index is prefix-closed.
-- Cost: for each partition O(log n + c log n) field reads for n blocks and c distinct depths; n <=
-- BLOCKS_PER_LOOKUP_MAX. Hashes and buckets are worked out once for all.
local function lookups(keys, args)
  local floor, sub, unpack_number = math.floor, string.sub, struct.unpack
  local divisor, hashes = bucket_divisor(args[1]), args[2]
  local n = floor(#hashes / HASH)
  local fields, buckets = {}, {}
  local prefix, seen, out

  local function holders_at(k)
    local known = seen[k]
    if known ~= nil then return known end
    local field = fields[k]
    if field == nil then
      local at = (k - 1) * HASH + 1
      field = sub(hashes, at, at + HASH - 1)
      fields[k], buckets[k] = field, ':' .. floor(unpack_number('>I4', hashes, at) / divisor)
    end
    known = redis.call('HGET', prefix .. buckets[k], field) or ''
    seen[k] = known
    return known
  end

  -- Everything strictly between two positions with equal holders holds the same; only intervals
  -- whose ends differ are divided.
  local function changes(low, low_holders, high, high_holders)
    if low_holders == high_holders then return end
    if high - low == 1 then
      if low > 0 then
        out[#out + 1] = low
        out[#out + 1] = low_holders
      end
      return
    end
    local middle = floor((low + high) / 2)
    local middle_holders = holders_at(middle)
    changes(low, low_holders, middle, middle_holders)
    changes(middle, middle_holders, high, high_holders)
  end

  local function look(anchor)
    prefix, seen, out = anchor, {}, {}
    local low, low_holders, high = 0, nil, 1
    while low < n do
      if high > n then high = n end
      local high_holders = holders_at(high)
      changes(low, low_holders, high, high_holders)
      low, low_holders = high, high_holders
      if high_holders == '' then return out end
      high = high * STRIDE
    end
    if n > 0 then
      out[#out + 1] = n
      out[#out + 1] = low_holders
    end
    return out
  end

  local found = {}
  for i = 1, #keys do found[i] = look(keys[i]) end
  return found
end

-- lookup: the same of one partition, KEYS[1] its anchor; returns its list alone. Servers of a cluster
-- take no keys of several partitions in one call.
local function lookup(keys, args)
  return lookups({keys[1]}, args)[1]
end

-- Both writes below: KEYS[1] anchor; ARGV[1] bucket bits, ARGV[2] local slot, ARGV[3] generation,
-- ARGV[4] hashes, concatenated, ARGV[5] last hash of the call before in the same pipeline, or ''.
-- Return 1; 0 when this generation may not write (the slot was swept or the data was lost); 2 when
-- the call before was not executed, so neither is this one: a child without its parent would be a
-- hole in the published chain. Applying one again is harmless.
-- Cost: O(hashes), at most BLOCKS_PER_WRITE_MAX of them.

local function holds(prefix, divisor, hash, slot)
  local holders = redis.call('HGET', bucket_key(prefix, hash, divisor), hash)
  if not holders then return false end
  if #holders <= LIST_MAX then return string.find(holders, string.char(slot), 1, true) ~= nil end
  local byte = string.byte(holders, math.floor(slot / 8) + 1)
  return bit.band(byte, bit.lshift(1, slot % 8)) ~= 0
end

-- store: one instance holds these blocks; parents before children. ARGV[6] seconds until a new
-- bucket expires (absent: it does not).
local function store(keys, args)
  if redis.call('HGET', keys[1], args[2]) ~= args[3] then return 0 end
  local prefix, divisor, slot = keys[1] .. ':', bucket_divisor(args[1]), tonumber(args[2])
  local mine, hashes, ttl_s = string.char(slot), args[4], args[6]
  if (args[5] or '') ~= '' and not holds(prefix, divisor, args[5], slot) then return 2 end
  for i = 1, #hashes, HASH do
    local hash = string.sub(hashes, i, i + HASH - 1)
    local key = bucket_key(prefix, hash, divisor)
    if redis.call('HSETNX', key, hash, mine) == 1 then
      if ttl_s and redis.call('HLEN', key) == 1 then redis.call('EXPIRE', key, ttl_s) end
    else
      local holders = redis.call('HGET', key, hash)
      local after = holders_add(holders, slot)
      if after ~= holders then redis.call('HSET', key, hash, after) end
    end
  end
  return 1
end

-- remove: one instance holds these blocks no more; children before parents.
local function remove(keys, args)
  if redis.call('HGET', keys[1], args[2]) ~= args[3] then return 0 end
  local prefix, divisor, slot = keys[1] .. ':', bucket_divisor(args[1]), tonumber(args[2])
  local mine, hashes = string.char(slot), args[4]
  if (args[5] or '') ~= '' and holds(prefix, divisor, args[5], slot) then return 2 end
  for i = 1, #hashes, HASH do
    local hash = string.sub(hashes, i, i + HASH - 1)
    local key = bucket_key(prefix, hash, divisor)
    local holders = redis.call('HGET', key, hash)
    if holders == mine then
      redis.call('HDEL', key, hash)
    elseif holders then
      redis.call('HSET', key, hash, holders_remove(holders, slot))
    end
  end
  return 1
end

-- open: let a generation of a slot write.
-- KEYS[1] anchor; ARGV[1] local slot, ARGV[2] generation, ARGV[3] seconds until the anchor expires
-- (absent: as before). Returns 1, or 0 for an older generation.
local function open(keys, args)
  local present = tonumber(redis.call('HGET', keys[1], args[1]) or '0')
  if present > tonumber(args[2]) then return 0 end
  redis.call('HSET', keys[1], args[1], args[2])
  if args[3] then redis.call('EXPIRE', keys[1], args[3]) end
  return 1
end

-- keep: put off the expiry of the anchor and of a run of buckets.
-- KEYS[1] anchor; ARGV[1] first bucket, ARGV[2] buckets (at most KEEP_BUCKETS_PER_CALL_MAX), ARGV[3]
-- ttl_s. Returns how many of those buckets there are. O(buckets).
local function keep(keys, args)
  local first, kept = tonumber(args[1]), 0
  redis.call('EXPIRE', keys[1], args[3])
  for b = first, first + tonumber(args[2]) - 1 do
    kept = kept + redis.call('EXPIRE', keys[1] .. ':' .. string.format('%d', b), args[3])
  end
  return kept
end

-- sweep: end a generation's right to write, and take its slot out of a run of buckets.
-- KEYS[1] anchor; ARGV[1] local slot, ARGV[2] generation, ARGV[3] first bucket, ARGV[4] buckets (0 to
-- SWEEP_BUCKETS_PER_CALL_MAX). Returns the number of blocks it was taken from, -1 when the slot has
-- passed to another generation and nothing was done. O(fields read).
local function sweep(keys, args)
  local slot, first, count = tonumber(args[1]), tonumber(args[3]), tonumber(args[4])
  local present = redis.call('HGET', keys[1], args[1])
  if present and present ~= args[2] then return -1 end
  redis.call('HDEL', keys[1], args[1])
  local taken = 0
  for b = first, first + count - 1 do
    local key = keys[1] .. ':' .. string.format('%d', b)
    local pairs_ = redis.call('HGETALL', key)
    for i = 1, #pairs_, 2 do
      local after = holders_remove(pairs_[i + 1], slot)
      if after ~= pairs_[i + 1] then
        taken = taken + 1
        if after == '' then
          redis.call('HDEL', key, pairs_[i])
        else
          redis.call('HSET', key, pairs_[i], after)
        end
      end
    end
  end
  return taken
end

redis.register_function{function_name='ts1_lookup', callback=lookup, flags={'no-writes'}}
redis.register_function{function_name='ts1_lookups', callback=lookups, flags={'no-writes'}}
redis.register_function{function_name='ts1_store', callback=store}
-- What is bounded or frees memory runs also when the server is at its limit.
redis.register_function{function_name='ts1_open', callback=open, flags={'allow-oom'}}
redis.register_function{function_name='ts1_remove', callback=remove, flags={'allow-oom'}}
redis.register_function{function_name='ts1_keep', callback=keep, flags={'allow-oom'}}
redis.register_function{function_name='ts1_sweep', callback=sweep, flags={'allow-oom'}}
