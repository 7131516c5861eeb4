"""The only place where a Redis key is spelled.

Every key carries the schema version and one hash tag. `{F}` is the fleet's tag (record, counters,
leases, ledgers), `{F:p}` is the tag of index partition p. A function receives an anchor key of its
tag and derives the rest from it, so a call never leaves its slot on Redis Cluster.
"""

import xxhash

from indexer.contract.identifiers import FleetId, RouterId, SlotIndex
from indexer.contract.limits import SCHEMA_VERSION

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


def instances(fleet: FleetId) -> str:
    """HASH: slot index -> msgpack InstanceRecord."""
    return f"{PREFIX}{{{fleet}}}:instances"


def routers(fleet: FleetId) -> str:
    """ZSET: router id -> end of its lease in Redis seconds."""
    return f"{PREFIX}{{{fleet}}}:routers"


def ledger(fleet: FleetId, router: RouterId) -> str:
    """HASH: request sequence -> packed reservation, owned by one router registration."""
    return f"{PREFIX}{{{fleet}}}:ledger:{router}"


def notices(fleet: FleetId, slot: SlotIndex) -> str:
    """LIST of packed `Notice`s for the sidecar of a slot; bounded, expires."""
    return f"{PREFIX}{{{fleet}}}:notices:{slot}"


def budgets(fleet: FleetId) -> str:
    """HASH: slot index -> "generation blocks" it may publish; expires unless renewed."""
    return f"{PREFIX}{{{fleet}}}:budgets"


def sibling_prefix(fleet: FleetId) -> str:
    """What the keys of prefixes in flight begin with: HASH slot index -> sibling."""
    return f"{PREFIX}{{{fleet}}}:s:"


def sweeper(fleet: FleetId) -> str:
    """STRING: leased mark of the one sidecar that sweeps dead slots."""
    return f"{PREFIX}{{{fleet}}}:sweeper"


def partition(fleet: FleetId, partition: int) -> str:
    """HASH: local slot -> generation that may write. The anchor of every index function."""
    return f"{PREFIX}{{{fleet}:{partition}}}:p"


def bucket(fleet: FleetId, partition_index: int, bucket_index: int) -> str:
    """HASH: block hash -> holders. The functions derive it from the anchor."""
    return f"{partition(fleet, partition_index)}:{bucket_index}"


def partition_pattern(fleet: FleetId, partition_index: int) -> str:
    """Glob of the anchor and all buckets of a partition, for SCAN."""
    return f"{partition(fleet, partition_index)}*"
