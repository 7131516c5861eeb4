"""What sidecar and router agree on; imported by both, imports nothing of ours.

`link/` is the one way to Redis, and the only part with sockets. `waits.py` and
`pem_files.py` agree on nothing: both programs need them.

Three identifiers must never be confused, so each has a type of its own (`identifiers.py`):

- `EngineBlockHash` is produced by vLLM, opaque, its seed may be random per process. It never
  leaves the sidecar.
- `BlockHash` is ours, canonical, a pure function of (root, block size, token ids, extra keys). It
  is the only hash in Redis and in the router.
- `InstanceId` names one engine process incarnation and data-parallel rank. A restart is a new
  instance, so stale residency dies with its lease.

The contract has one version, `limits.SCHEMA_VERSION`. It is part of every key (`keys.py`), of every
function name and of the root of every hash chain (`block_hash.py`), so two versions live side by
side during a rollout without seeing each other.
"""
