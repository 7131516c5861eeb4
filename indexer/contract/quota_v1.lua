#!lua name=ts1_quota
-- What one API key may use, counted for all routers together. A key of a client has one hash:
--   r, t        Redis time in microseconds at which its requests, its tokens would be paid for
--   c:<router>  "requests in flight there, Redis time until which that holds"
-- The first two are theoretical arrival times of the generic cell rate algorithm: a cost moves them
-- on by cost x interval, and is admitted while they are at most a window ahead of now. So over any
-- time T no more than (T + window) / interval is admitted. Routers count their own requests in
-- flight, and tell the number each time: a call that is lost or repeated puts nothing out of step.

-- Named fields; nil for what is not there. What is no hash was not written here.
local function read(key, ...)
  local found = redis.pcall('HMGET', key, ...)
  if not found.err then return found end
  redis.call('DEL', key)
  return {}
end

local function now_us()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- No debt is longer than debt_us beyond the window, whatever outputs cost or clocks do.
local function paid_at(value, now, window_us, debt_us)
  return math.min(math.max(value or 0, now), now + window_us + debt_us)
end

-- Requests in flight at other routers that are alive; forgets the others.
local function elsewhere(key, own, now)
  local in_flight, all = 0, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local field = all[i]
    if string.sub(field, 1, 2) == 'c:' and field ~= own then
      local requests, until_us = string.match(all[i + 1], '^(%d+) (%d+)$')
      if not requests or tonumber(until_us) <= now then
        redis.call('HDEL', key, field)
      else
        in_flight = in_flight + tonumber(requests)
      end
    end
  end
  return in_flight
end

local function write(key, router, in_flight, now, lease_us, values)
  local ends = now + lease_us
  local fields = {router, string.format('%d %.0f', in_flight, ends)}
  for field, value in pairs(values) do
    fields[#fields + 1], fields[#fields + 2] = field, string.format('%.0f', value)
    ends = math.max(ends, value)
  end
  redis.call('HSET', key, unpack(fields))
  redis.call('PEXPIRE', key, string.format('%.0f', math.ceil((ends - now) / 1000)))
end

-- take: admit one request of a key, or say what is in its way; refused, it costs nothing.
-- KEYS[1] the key's hash; ARGV router id, requests of the key in flight there with this one, most
-- in flight everywhere (0: any number), lease_us, debt_us, us a request (0: no limit), window of
-- requests in us, us a token (0: no limit), window of tokens in us, tokens.
-- Returns {0 admitted, 1 requests, 2 tokens, 3 in flight, 4 more tokens than are ever admitted at
-- once; us to wait; requests left; tokens left (-1: no limit); routers that count for the key, of
-- which some may have died since the last of them came}.
-- O(routers that have had requests of the key within a lease) where there is a bound on requests in
-- flight or the router is new to the key, else O(1).
local function take(keys, args)
  local router, in_flight, most = 'c:' .. args[1], tonumber(args[2]), tonumber(args[3])
  local lease_us, debt_us = tonumber(args[4]), tonumber(args[5])
  local request_us, requests_us = tonumber(args[6]), tonumber(args[7])
  local token_us, tokens_us, tokens = tonumber(args[8]), tonumber(args[9]), tonumber(args[10])
  local now = now_us()
  local was = read(keys[1], 'r', 't', router)
  local r = paid_at(tonumber(was[1] or 0), now, requests_us, debt_us) + request_us
  local t = paid_at(tonumber(was[2] or 0), now, tokens_us, debt_us) + tokens * token_us
  local others = 0
  if most > 0 or not was[3] then others = elsewhere(keys[1], router, now) end
  local verdict, wait_us = 0, 0
  if most > 0 and others + in_flight > most then
    verdict = 3
  elseif request_us > 0 and r > now + requests_us then
    verdict, wait_us = 1, r - now - requests_us
  elseif token_us > 0 and tokens * token_us > tokens_us then
    verdict = 4
  elseif token_us > 0 and t > now + tokens_us then
    verdict, wait_us = 2, t - now - tokens_us
  end
  if verdict ~= 0 then
    r, t, in_flight = r - request_us, t - tokens * token_us, in_flight - 1
  end
  local counted = {}
  if request_us > 0 then counted.r = r end
  if token_us > 0 then counted.t = t end
  write(keys[1], router, in_flight, now, lease_us, counted)
  local rates = (counted.r and 1 or 0) + (counted.t and 1 or 0)
  local routers = math.max(1, redis.call('HLEN', keys[1]) - rates)
  local requests_left = request_us > 0 and math.floor((now + requests_us - r) / request_us) or -1
  local tokens_left = token_us > 0 and math.max(0, math.floor((now + tokens_us - t) / token_us)) or -1
  return {verdict, math.ceil(wait_us), requests_left, tokens_left, routers}
end

-- settle: what requests that have ended cost beyond what was known when they were admitted, and how
-- many of the key are still in flight at a router. Never refused: they have been served.
-- KEYS[1] the key's hash; ARGV router id, requests of the key in flight there, lease_us, debt_us,
-- us a token (0: no limit), window of tokens in us, tokens. Returns 1. O(1) beyond reading the hash.
local function settle(keys, args)
  local token_us, tokens_us = tonumber(args[5]), tonumber(args[6])
  local now = now_us()
  local was = read(keys[1], 'r', 't')
  local counted = {r = was[1] and tonumber(was[1]) or nil}
  if token_us > 0 then
    local debt_us = tonumber(args[4])
    local t = paid_at(tonumber(was[2] or 0), now, tokens_us, debt_us) + tonumber(args[7]) * token_us
    counted.t = math.min(t, now + tokens_us + debt_us)
  end
  write(keys[1], 'c:' .. args[1], tonumber(args[2]), now, tonumber(args[3]), counted)
  return 1
end

redis.register_function{function_name='ts1_quota_take', callback=take, flags={'allow-oom'}}
redis.register_function{function_name='ts1_quota_settle', callback=settle, flags={'allow-oom'}}
