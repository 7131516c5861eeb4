-- What queued prefill tokens attend to: a part of the library ts1_fleet, before reservations_v1.lua.
--
-- Contexts: STRING beside the counters, a u32 for each slot: how many tokens one of its prefill tokens
--           attends to, the mean over those reserved. Only booking changes it: what is taken off the
--           queue is taken for average. So it needs no entry for each request, and where nothing is
--           queued it means nothing. Functions that do not know it leave it as right as it was.

local CONTEXT, CONTEXTS_TTL_S = 4, 7200

local function contexts_key(counters)
  return string.sub(counters, 1, -9) .. 'contexts'  -- in place of 'counters', as in keys.py
end

-- The counters, '' where there are none; and the contexts, '' also where something else is there.
-- One call for both; of counters of another type only GET says so, as an error.
local function counters_and_contexts(counters)
  local values = redis.call('MGET', counters, contexts_key(counters))
  return values[1] or redis.call('GET', counters) or '', values[2] or ''
end

-- More tokens of a context of their own (0: nobody told) join those queued on a slot. `contexts` as
-- they are; nil: to be read.
local function book_context(counters, contexts, slot, queued, tokens, context)
  if tokens == 0 or context == 0 then return end
  local key, at = contexts_key(counters), slot * CONTEXT
  contexts = contexts or redis.call('MGET', key)[1] or ''  -- of another type: as if it were not there
  local mean = #contexts >= at + CONTEXT and struct.unpack('<I4', contexts, at + 1) or 0
  if queued > 0 and mean > 0 then
    context = math.floor((queued * mean + tokens * context) / (queued + tokens) + 0.5)
  end
  if contexts == '' then redis.call('DEL', key) end  -- of another type than it is to have
  redis.call('SETRANGE', key, at, struct.pack('<I4', context))
  -- It is not renewed: begun anew every two hours it is as good.
  if contexts == '' then redis.call('EXPIRE', key, CONTEXTS_TTL_S) end
end

-- Tokens that the last new ones of a prompt attend to, on average.
local function mean_context(prompt, new)
  return math.max(0, prompt - math.floor(new / 2))
end
