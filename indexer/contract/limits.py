"""Every shared bound, with its unit and its reason."""

from typing import Final

SCHEMA_VERSION: Final = 1

BLOCK_HASH_BYTES: Final = 8
"""xxh3_64 digest. At 10^8 blocks a collision has a chance of 3 in 10,000; it costs a bad guess."""

BLOCK_SIZE_TOKENS_DEFAULT: Final = 16
"""vLLM's own default; a larger canonical block shrinks index and write rate at a coarser answer."""

BLOCK_SIZE_TOKENS_MIN: Final = 8
BLOCK_SIZE_TOKENS_MAX: Final = 1024

PROMPT_TOKENS_MAX: Final = 1 << 20
"""Longest prompt a lookup covers (1 M tokens)."""

BLOCKS_PER_LOOKUP_MAX: Final = 1 << 17
"""Hashes in one lookup: 1 MiB of arguments, and the lookup itself is logarithmic in it."""

BLOCKS_PER_WRITE_MAX: Final = 256
"""Block changes in one publish call, so that no call holds the server for more than about 1 ms."""

SLOTS_PER_PARTITION_MAX: Final = 256
"""A holder is one byte in a bucket's value, a full set of holders is a bitmap of 32 bytes."""

PARTITIONS_MAX: Final = 16
"""4,096 instances a fleet; the counters of all of them are read in one call."""

BUCKET_BITS_MIN: Final = 4
BUCKET_BITS_MAX: Final = 24
BLOCKS_PER_BUCKET_MEAN: Final = 64
"""A bucket stays in Redis's compact encoding up to 128 fields; the mean leaves room for spread."""

INSTANCES_EXPECTED_DEFAULT: Final = 64
"""Instances a partition is sized for when the operator says nothing."""

CANDIDATES_PER_RESERVE_MAX: Final = 64
"""Instances weighed inside one reservation: the best by the snapshot's scores."""

SWEEP_BUCKETS_PER_CALL_MAX: Final = 64
"""About 4,000 fields: one sweep call holds the server for a few milliseconds at most."""

INSTANCE_LEASE_TTL_S: Final = 5.0
INSTANCE_LEASE_RENEW_S: Final = 1.0
HEARTBEATS_PER_S_MAX: Final = 2500
"""Of a whole fleet: an eighth of the server at 50 us each. Larger fleets' sidecars beat less often,
though never less than the lease needs."""

INSTANCE_GRACE_S: Final = 30.0
"""How long a slot with a dead lease may still be revived by its own sidecar before it is swept."""

ROUTER_LEASE_TTL_S: Final = 10.0
ROUTER_LEASE_RENEW_S: Final = 1.0

QUOTA_LEASE_S: Final = 15.0
"""How long a router's number of requests in flight of one API key counts unless it is renewed."""

QUOTA_RENEW_S: Final = 5.0

QUOTA_DEBT_MAX_S: Final = 600.0
"""The longest that an API key waits because its answers were longer than its limit pays for, or
because the clock of Redis went back."""

RESPONSES_PER_KEY_MAX: Final = 128
"""Responses whose holders are remembered under one of 4,096 keys: half a million in 22 MB, and a
key that stays in Redis's compact encoding. Making room for eight reads them all: about 0.2 ms."""

SIBLING_BLOCKS_MIN: Final = 16
"""A request with fewer new blocks is no sibling worth following: about 10 ms of prefill."""

SIBLING_TTL_S: Final = 10.0
"""How long a request in prefill is credited to others; see `reservations.InFlight`."""

MILESTONES_MAX: Final = 60
"""Depths at which siblings meet: four an octave and the end of the longest chain."""

CLASS_WINDOW_S: Final = 30
"""Of Redis time: recent requests, by whose shares classes are judged, and how long a class's state
says something when no request of it comes."""

CLASS_PLACES: Final = range(10_000, 100_000)
"""Of counters (u32) of one window's prefixes, all of five digits: 400 kB, at most three of them a
fleet. That one of 64 frequent prefixes shares a counter with one of 10 hot ones has a chance of
0.7 %; it then passes for as hot, which costs it some holders more than it needs."""

CLASS_PREFIXES_MAX: Final = 18
"""Depths 1, 2, 4, ... of the longest chain."""

CLASSES_MAX: Final = 64
"""Classes that may be in trouble at once; of more, those that come first are watched."""

AWAITED_PER_HEARTBEAT_MAX: Final = 1024
"""Awaited blocks looked at in one heartbeat: under a millisecond; of more, any are picked."""

NOTICES_PER_SLOT_MAX: Final = 64
"""Notices that wait for a sidecar; the oldest give way."""

NOTICE_TTL_S: Final = 30
"""A notice that nobody has taken by then is about a state long past."""

NOTICE_BLOCKS_MAX: Final = 1 << 14
"""Hashes in a notice: 128 KiB; deeper differences are counted and not told."""

RESERVATIONS_PER_AUDIT_MAX: Final = 1 << 15
"""Compared with the counters in one call, about a microsecond each: it holds the server for 40 ms.
Fleets with more in flight at once are not audited until there are fewer."""

BUDGETS_TTL_S: Final = 30
"""Renewed every second; outlives the change of the sidecar that divides (its lease: 10 s)."""

BUCKETS_PER_MEASURE_MAX: Final = 256
BLOCKS_PER_MEASURE_MAX: Final = 4096
"""One measurement of a partition holds the server for 1 to 3 ms."""

DIRECTORY_TTL_S: Final = 3600
"""Expiry of a fleet's keys that no lease owns; every heartbeat of any of its sidecars renews it."""

INDEX_TTL_S: Final = 2 * DIRECTORY_TTL_S
"""Expiry of the index's keys. Longer than the fleet record's: whoever could not renew them has lost
its slot by then and publishes everything anew, so no living instance misses a block unknowingly."""

INDEX_RENEW_S: Final = DIRECTORY_TTL_S / 4

KEEP_BUCKETS_PER_CALL_MAX: Final = 1024
"""Expiries renewed in one call: about 1 ms of the server."""

assert 1 << (CLASS_PREFIXES_MAX - 1) == BLOCKS_PER_LOOKUP_MAX, "the deepest class is a whole chain"
assert BLOCKS_PER_LOOKUP_MAX * BLOCK_SIZE_TOKENS_MIN >= PROMPT_TOKENS_MAX, (
    "one lookup cannot cover the longest prompt"
)
assert INSTANCE_LEASE_RENEW_S * 3 <= INSTANCE_LEASE_TTL_S, "two lost renewals would end a lease"
assert INDEX_RENEW_S * 3 <= INDEX_TTL_S, "two lost renewals would lose blocks"
assert ROUTER_LEASE_RENEW_S * 3 <= ROUTER_LEASE_TTL_S, "two lost renewals would end a lease"
assert QUOTA_RENEW_S * 3 <= QUOTA_LEASE_S, "two lost renewals would forget requests in flight"
assert SLOTS_PER_PARTITION_MAX == 1 << 8, "a holder is one byte"
