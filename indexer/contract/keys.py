"""The only place where a Redis key is spelled.

Every key carries the schema version and one hash tag. `{F}` is the fleet's tag (record, counters,
leases, ledgers), `{F:p.s}` is the tag of index partition p, s chosen for its slot, `{q:K}` is that
of an API key, `{r:D}` that of responses whose ids' digests begin with D. A function receives an
anchor key of its tag and derives the rest from it, so a call never leaves its slot on Redis
Cluster.
"""

from binascii import crc_hqx
from functools import lru_cache
from itertools import count

import xxhash
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as CLUSTER_SLOTS

from indexer.contract.identifiers import FleetId, RouterId, SlotIndex
from indexer.contract.limits import PARTITIONS_MAX, SCHEMA_VERSION

PREFIX = f"ts{SCHEMA_VERSION}:"


def fleet_id(model_scope: str) -> FleetId:
    """Derive the fleet's identity from its model scope (the primary served model name)."""
    return FleetId(xxhash.xxh3_64_hexdigest(model_scope.encode(), seed=SCHEMA_VERSION))


def directory() -> str:
    """SET of the fleet ids that have or recently had instances."""
    return f"{PREFIX}fleets"


def fleet(fleet: FleetId) -> str:
    """HASH: the fleet record. Also the anchor of every fleet function."""
    return f"{PREFIX}{{{fleet}}}:fleet"


def counters(fleet: FleetId) -> str:
    """STRING: header and one packed record per slot (`records.py`)."""
    return f"{PREFIX}{{{fleet}}}:counters"


def contexts(fleet: FleetId) -> str:
    """STRING: mean context of what is queued, u32 by slot; the functions derive it, expires."""
    return f"{PREFIX}{{{fleet}}}:contexts"


def instances(fleet: FleetId) -> str:
    """HASH: slot index -> msgpack InstanceRecord."""
    return f"{PREFIX}{{{fleet}}}:instances"


def routers(fleet: FleetId) -> str:
    """ZSET: router id -> end of its lease in Redis seconds."""
    return f"{PREFIX}{{{fleet}}}:routers"


def ledger(fleet: FleetId, router: RouterId) -> str:
    """HASH: request sequence -> packed reservation, owned by one router registration."""
    return f"{PREFIX}{{{fleet}}}:ledger:{router}"


def awaited(fleet: FleetId, slot: SlotIndex) -> str:
    """HASH: request sequence (8 bytes) and router id -> hash of the block that ends its prefill.

    The functions derive it from the counters' key.
    """
    return f"{PREFIX}{{{fleet}}}:w:{slot}"


def notices(fleet: FleetId, slot: SlotIndex) -> str:
    """LIST of packed `Notice`s for the sidecar of a slot; bounded, expires."""
    return f"{PREFIX}{{{fleet}}}:notices:{slot}"


def budgets(fleet: FleetId) -> str:
    """HASH: slot index -> "generation blocks" it may publish; expires unless renewed."""
    return f"{PREFIX}{{{fleet}}}:budgets"


def sibling_prefix(fleet: FleetId) -> str:
    """What the keys of prefixes in flight begin with: HASH slot index -> sibling."""
    return f"{PREFIX}{{{fleet}}}:s:"


def class_counts(fleet: FleetId, window: int) -> str:
    """STRING: how many requests of a window of Redis time had which prefix; expires.

    The functions derive it from the counters' key, and `class_states` likewise.
    """
    return f"{PREFIX}{{{fleet}}}:c:{window}"


def class_states(fleet: FleetId) -> str:
    """HASH: hash of a prefix -> state of the class of requests that begin with it; expires."""
    return f"{PREFIX}{{{fleet}}}:classes"


def sweeper(fleet: FleetId) -> str:
    """STRING: leased mark of the one sidecar that sweeps dead slots."""
    return f"{PREFIX}{{{fleet}}}:sweeper"


def quota(caller: str) -> str:
    """HASH: what the API key of this name has used up, under a tag of its own; expires."""
    return f"{PREFIX}{{q:{xxhash.xxh3_64_hexdigest(caller.encode(), seed=SCHEMA_VERSION)}}}:quota"


def responses(digest: bytes) -> str:
    """HASH: digest of a response's id -> who holds it, and until when; 4,096 of them; expires."""
    return f"{PREFIX}{{r:{digest[:2].hex()[:3]}}}:responses"


@lru_cache(maxsize=16 * PARTITIONS_MAX)
def partition(fleet: FleetId, partition: int, partitions: int) -> str:
    """HASH: local slot -> generation that may write. The anchor of every index function.

    Left to chance, one shard of a cluster may have two partitions of a fleet and another none. So
    the tag ends in four digits that put partition p of n exactly p/n around the ring of slots,
    counted from half a step after the fleet's own slot: each of s shards with equal ranges then has
    n/s partitions, rounded down or up.
    """
    fleet_slot = crc_hqx(fleet.encode(), 0) % CLUSTER_SLOTS
    wanted = int(fleet_slot + (partition + 0.5) * CLUSTER_SLOTS / partitions) % CLUSTER_SLOTS
    tag = f"{fleet}:{partition}."
    return f"{PREFIX}{{{tag}{_suffix(tag, wanted)}}}:p"


def _suffix(tag: str, slot: int) -> str:
    """What to append to a tag so that it falls into a slot.

    Of a CRC, crc(tag + a + b) = crc(tag + a + zeros) xor crc(b): so the fitting b is looked up, and
    about 64 a are tried.
    """
    ends = {crc_hqx(b"%02x" % n, 0) % CLUSTER_SLOTS: n for n in range(256)}
    for n in count():
        before = crc_hqx(b"%02x" % n, crc_hqx(tag.encode(), 0))
        end = ends.get(crc_hqx(b"\0\0", before) % CLUSTER_SLOTS ^ slot)
        if end is not None:
            return f"{n:02x}{end:02x}"
    raise AssertionError("count() does not end")


def bucket(anchor: str, bucket_index: int) -> str:
    """HASH: block hash -> holders. The functions derive it from the partition's key."""
    return f"{anchor}:{bucket_index}"


def partition_pattern(anchor: str) -> str:
    """Glob of a partition's key and all its buckets, for SCAN."""
    return f"{anchor}*"
