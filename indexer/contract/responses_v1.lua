#!lua name=ts1_responses
-- Which instance holds an answer that clients may name in later requests. Ids are spread over hashes
-- by their digest, field = digest of the id, value = the holder's 16 bytes, then Redis time in
-- seconds (big-endian u32) until which it is remembered. A hash that is full gives up what has ended,
-- and a sixteenth of it at least: what would end first.

local HOLDER_BYTES = 16

local function now_s()
  return tonumber(redis.call('TIME')[1])
end

local function until_s(value)
  if #value ~= HOLDER_BYTES + 4 then return 0 end
  return struct.unpack('>I4', value, HOLDER_BYTES + 1)
end

-- For several, because reading all of them costs more than the rest of the call.
local function make_room(key, most)
  local all, ends_s, fields = redis.call('HGETALL', key), {}, {}
  for i = 1, #all, 2 do
    fields[#fields + 1], ends_s[all[i]] = all[i], until_s(all[i + 1])
  end
  table.sort(fields, function(a, b) return ends_s[a] < ends_s[b] end)
  local now, gone = now_s(), math.max(1, math.floor(most / 16))
  while fields[gone + 1] and ends_s[fields[gone + 1]] <= now do gone = gone + 1 end
  redis.call('HDEL', key, unpack(fields, 1, gone))
end

-- hold: remember who holds a response; said again, the later one counts.
-- KEYS[1] the id's hash; ARGV digest of the id, the holder's 16 bytes, seconds to remember it, most
-- ids in one hash. Returns 1. O(1), and O(most log most) where the hash is full.
local function hold(keys, args)
  local key, id, kept_s, most = keys[1], args[1], tonumber(args[3]), tonumber(args[4])
  local count = redis.pcall('HLEN', key)
  if type(count) == 'table' then  -- what is no hash was not written here
    redis.call('DEL', key)
    count = 0
  end
  if count >= most and redis.call('HEXISTS', key, id) == 0 then make_room(key, most) end
  redis.call('HSET', key, id, args[2] .. struct.pack('>I4', now_s() + kept_s))
  if redis.call('TTL', key) < kept_s then redis.call('EXPIRE', key, kept_s) end
  return 1
end

-- holder: who holds a response.
-- KEYS[1] the id's hash; ARGV digest of the id. Returns the holder's 16 bytes, or nil. O(1).
local function holder(keys, args)
  local value = redis.pcall('HGET', keys[1], args[1])
  if type(value) ~= 'string' or until_s(value) <= now_s() then return false end
  return string.sub(value, 1, HOLDER_BYTES)
end

redis.register_function{function_name='ts1_response_hold', callback=hold}
redis.register_function{function_name='ts1_response_holder', callback=holder, flags={'no-writes'}}
