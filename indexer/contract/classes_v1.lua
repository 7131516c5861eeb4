-- Classes of requests by what their prompts begin with: a part of the library ts1_fleet.
--
-- A request is named by its prefixes of 1, 2, 4, 8, ... blocks, shallow first: 14 bytes each, the
-- hash of the prefix and the place of its counter, as BITFIELD takes it (#10000 to #99999); by
-- anything shorter than that where it has no full block.
--
-- Counts: STRING of big-endian u32 for each CLASS_WINDOW_S of Redis time: first all requests
--         booked, then, from place 10000 on, those with a prefix. Prefixes may meet at a place;
--         none is counted too low.
-- States: HASH, hash of a prefix -> streak u32, requests steered away u32, taken out u8, told at
--         (f64), and details as the router told them. It says something for CLASS_WINDOW_S.

local CLASS_WINDOW_S, CLASSES_MAX = 30, 64  -- as in limits.py
local CLASS_STATE, CLASS_VERDICT, DETAILS_AT = '<I4I4I1d', '<c8I1I4', 14
local STREAK, STEERED, TAKEN_OUT, TOLD_AT = 1, 2, 3, 4
local CLASS_STEERED, CLASS_OVER = 2, 3  -- 1: watched
local HASH, PREFIX, STATE_BYTES = 8, 14, 29
local NO_STATE = '\0\0\0\0\0'  -- streak, standing

local function class_counts_key(counters, window)
  return string.gsub(counters, 'counters$', 'c:') .. string.format('%d', window)
end

local function class_states_key(counters)
  return (string.gsub(counters, 'counters$', 'classes'))
end

-- One call about a key of ours; nil where that is of another type than it is to have.
local function class_call(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then return nil end
  return answer
end

-- What BITFIELD is asked of all requests, then of each prefix; `added` is nil of a GET.
local function class_places(prefixes, verb, added)
  local asked = {verb, 'u32', '#0', added}
  local width, at = #asked, #asked
  for i = 1, #prefixes - PREFIX + 1, PREFIX do
    asked[at + 1], asked[at + 2], asked[at + 4] = verb, 'u32', added
    asked[at + 3] = string.sub(prefixes, i + HASH, i + PREFIX - 1)
    at = at + width
  end
  return asked
end

-- Counts one booked request. O(prefixes).
local function count_classes(counters, prefixes, now)
  local key = class_counts_key(counters, math.floor(now / CLASS_WINDOW_S))
  local counts = class_call('BITFIELD', key, unpack(class_places(prefixes, 'INCRBY', 1)))
  if not counts then
    redis.call('DEL', key)
  elseif counts[1] == 1 then
    redis.call('EXPIRE', key, 2 * CLASS_WINDOW_S)
  end
end

-- A state, or nil when nobody has told of it for a window, or it is none. `value` may be false.
local function class_state(value, now)
  if not value or #value < STATE_BYTES then return nil end
  local state = {struct.unpack(CLASS_STATE, value)}
  return state[TOLD_AT] >= now - CLASS_WINDOW_S and state or nil
end

-- Room for one more state: those that say nothing any more go. Whether there is any.
local function make_class_room(key, now)
  if redis.call('HLEN', key) < CLASSES_MAX then return true end
  local all, left = redis.call('HGETALL', key), CLASSES_MAX
  for i = 1, #all, 2 do
    if not class_state(all[i + 1], now) then
      redis.call('HDEL', key, all[i])
      left = left - 1
    end
  end
  return left < CLASSES_MAX
end

-- Notes what a router says of a booked request's class. `lower`: it went to a holder.
-- Watched: a streak of such requests goes on or ends; as long as `least`, it takes the holders out.
-- Steered: the holders were no candidates. Over: there is no trouble (any more).
local function judge_class(counters, verdict, lower, now)
  local class, said, least = struct.unpack(CLASS_VERDICT, verdict)
  local key = class_states_key(counters)
  if said == CLASS_OVER then
    class_call('HDEL', key, class)
    return
  end
  local value = class_call('HGET', key, class)
  if value == nil then redis.call('DEL', key) end
  local state = class_state(value, now)
  if said == CLASS_STEERED then
    if not state then return end  -- readmitted since that router looked
    state[STEERED] = state[STEERED] + 1
  else
    if not value and not make_class_room(key, now) then return end
    state = state or {0, 0, 0}
    state[STREAK] = lower and state[STREAK] + 1 or 0
    if state[STREAK] >= least then state[TAKEN_OUT] = 1 end
  end
  redis.call('HSET', key, class, struct.pack(CLASS_STATE, state[STREAK], state[STEERED],
    state[TAKEN_OUT], now) .. string.sub(verdict, DETAILS_AT))
  redis.call('EXPIRE', key, 2 * CLASS_WINDOW_S)
end

-- Counts of all requests and of prefixes, in this window and in the one before it; and how much of
-- that one still belongs to the last CLASS_WINDOW_S, 0..1. Counts that cannot be read are nil.
local function recent_counts(counters, prefixes, now)
  local window = math.floor(now / CLASS_WINDOW_S)
  local asked = class_places(prefixes, 'GET')
  local current = class_call('BITFIELD_RO', class_counts_key(counters, window), unpack(asked))
  local before = class_call('BITFIELD_RO', class_counts_key(counters, window - 1), unpack(asked))
  return current, before, 1 - (now - window * CLASS_WINDOW_S) / CLASS_WINDOW_S
end

-- What recent requests say of one that comes: {the share of the window before (17 digits), counts
-- in this window, counts in the one before, standings}: counts are those of all requests, then of
-- each of its prefixes; standings are '' or of each of its classes 5 bytes: streak u32, and u8: 0 no
-- trouble, 1 watched, 2 taken out. '' where counts cannot be read. O(prefixes).
local function recent_classes(counters, prefixes, now)
  local current, before, weight = recent_counts(counters, prefixes, now)
  if not current or not before then return '' end
  local key, names, standings = class_states_key(counters), {}, {}
  if #prefixes >= PREFIX and redis.call('EXISTS', key) == 1 then
    for i = 1, #prefixes - PREFIX + 1, PREFIX do
      names[#names + 1] = string.sub(prefixes, i, i + HASH - 1)
    end
    local values = class_call('HMGET', key, unpack(names)) or {}
    for i = 1, #names do
      local state = class_state(values[i], now)
      standings[i] = state
        and struct.pack('<I4I1', state[STREAK], 1 + state[TAKEN_OUT]) or NO_STATE
    end
  end
  return {string.format('%.17g', weight), current, before, table.concat(standings)}
end

-- classes: the classes that may be in trouble, for operators.
-- KEYS[1] counters; no ARGV.
-- Returns {now in seconds and requests of the last window (f64 each), {hash of a prefix, its state
-- (29 bytes), and so on; those that say nothing any more are left out}}. O(CLASSES_MAX).
local function classes(keys, _)
  local now = now_s()
  local all, states = class_call('HGETALL', class_states_key(keys[1])) or {}, {}
  for i = 1, #all, 2 do
    if class_state(all[i + 1], now) then
      states[#states + 1] = all[i]
      states[#states + 1] = all[i + 1]
    end
  end
  local current, before, weight = recent_counts(keys[1], '', now)
  local requests = current and before and current[1] + before[1] * weight or 0
  return {struct.pack('<dd', now, requests), states}
end

redis.register_function{function_name='ts1_classes', callback=classes, flags={'no-writes'}}
