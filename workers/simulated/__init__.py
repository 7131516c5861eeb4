"""A stand-in for one vLLM instance: same API, same KV events, time from a cost model."""
