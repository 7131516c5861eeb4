"""Record types of the contract and their codecs.

Counters are one packed string per fleet: a header, then one fixed record per slot, all
little-endian. Lua (`fleet_v1.lua`) and numpy read the same bytes. Instance records are msgpack maps
with field names: unknown fields are ignored, missing optional ones take their default.
"""

import struct
from dataclasses import asdict, dataclass, field, fields
from enum import IntFlag, StrEnum
from typing import Any, Final, Self

import msgpack
import numpy as np
import numpy.typing as npt

from indexer.contract.identifiers import BlockHash, FleetId, InstanceId
from indexer.contract.limits import SCHEMA_VERSION

COUNTERS_MAGIC: Final = b"TS1\x00"

COUNTERS_HEADER: Final = np.dtype(
    [
        ("magic", "S4"),
        ("membership", "<u4"),  # grows with every join, leave and change of an instance record
        ("epoch", "<u8"),  # drawn when the fleet is created; another value means data was lost
        ("partitions", "<u4"),
        ("spare", "<u4", 3),
    ]
)

COUNTERS_RECORD: Final = np.dtype(
    [
        ("generation", "<u4"),  # incarnation of the slot; 0 = never used
        ("flags", "<u4"),  # SlotFlag
        ("reserved_requests", "<u4"),  # reserved by routers and not yet released
        ("reserved_prefill_tokens", "<u4"),  # their new prefill tokens not yet known as computed
        ("reserved_requests_peak", "<u4"),  # largest reserved_requests since the last heartbeat
        ("foreign_requests", "<u4"),  # running + waiting beyond what routers have reserved
        ("running_count", "<u4"),  # as the engine last reported
        ("waiting_count", "<u4"),  # as the engine last reported
        ("kv_usage_millionths", "<u4"),
        ("index_blocks", "<u4"),  # canonical blocks published, or withheld for want of room
        ("completeness_millionths", "<u4"),  # of what the engine holds, known to its sidecar
        ("last_reserved_s", "<u4"),  # Redis time of the last reservation, whole seconds; 0 = never
        ("lease_until_s", "<f8"),  # Redis time
        ("published_s", "<f8"),  # Redis time of the last heartbeat that carried engine counters
    ]
)

CONTEXT: Final = np.dtype("<u4")
"""Tokens that a prefill token reserved on a slot attends to, on average; an array by slot index.

It stands beside the counters, in a key of its own: who does not know it changes nothing in it, and
because it is a mean, what such a one takes off the queue leaves it right.
"""

_SIZES = (COUNTERS_HEADER.itemsize, COUNTERS_RECORD.itemsize)
assert _SIZES == (32, 64), "the Lua source reads these sizes"

_HEADER: Final = struct.Struct("<4sIQ16x")
"""The beginning of COUNTERS_HEADER: numpy takes several times as long for a single record."""

COUNTS: Final = 12
TIMES: Final = 2
"""COUNTERS_RECORD has so many whole numbers, and after them so many times."""

assert [COUNTERS_RECORD[place].str for place in range(COUNTS + TIMES)] == (
    COUNTS * ["<u4"] + TIMES * ["<f8"]
)


class SlotFlag(IntFlag):
    """State of a slot, in `flags`."""

    USED = 1
    CLOSING = 2  # being swept; refuses heartbeats and reservations
    DRAINING = 4  # takes no new request
    SLEEPING = 8  # answers its health check but does not serve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What an engine's metrics say about one instance."""

    running_count: int
    waiting_count: int
    kv_usage_ratio: float  # 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCounters:
    """What a sidecar says about its own part of the index."""

    blocks: int  # canonical blocks published, or withheld for want of room
    completeness_ratio: float  # 0..1; below 1 after a loss of events until it is made good


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """What Redis tells a sidecar at each heartbeat.

    Attributes:
        reserved_requests: on its slot.
        reserved_prefill_tokens: on its slot.
        budget_blocks: canonical blocks it may publish; None for no limit.
        now_s: Redis time.
        notices: packed `Notice`s that routers have left for it, oldest first.
        awaited: blocks whose being stored ends the prefill of a request on its slot.
        prefills_ended_count: by the blocks that this heartbeat has told to be stored.
        fleet_instances_count: of the whole fleet.
    """

    reserved_requests: int
    reserved_prefill_tokens: int
    budget_blocks: int | None
    now_s: float
    notices: tuple[bytes, ...]
    awaited: tuple[BlockHash, ...] = ()
    prefills_ended_count: int = 0
    fleet_instances_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLate:
    """A heartbeat was under way for longer than a lease: it renewed nothing.

    Attributes:
        now_s: Redis time.
    """

    now_s: float


@dataclass(frozen=True, slots=True)
class FleetCounters:
    """The packed counters of one fleet, decoded without copying.

    Attributes:
        now_s: Redis time of the read.
        membership: see COUNTERS_HEADER.
        epoch: see COUNTERS_HEADER.
        slots: shape (slots,), dtype COUNTERS_RECORD; index = slot index.
        contexts: mean context of the prefill tokens reserved on each slot, dtype CONTEXT; as long
            as anybody has told, so often shorter than slots.
    """

    now_s: float
    membership: int
    epoch: int
    slots: npt.NDArray[np.void]
    contexts: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, CONTEXT))

    @classmethod
    def decode(cls, raw: bytes, now_s: float, contexts: bytes = b"") -> Self:
        """Decode the counters string, and that of the contexts.

        Raises:
            ValueError: the bytes are not counters of this schema version.
        """
        if len(raw) < COUNTERS_HEADER.itemsize or raw[:4] != COUNTERS_MAGIC:
            raise ValueError(f"not fleet counters of schema {SCHEMA_VERSION}: {raw[:16]!r}")
        _, membership, epoch = _HEADER.unpack_from(raw)
        count = (len(raw) - COUNTERS_HEADER.itemsize) // COUNTERS_RECORD.itemsize
        slots = np.frombuffer(raw, COUNTERS_RECORD, count, COUNTERS_HEADER.itemsize)
        whole = len(contexts) - len(contexts) % CONTEXT.itemsize
        return cls(
            now_s=now_s,
            membership=membership,
            epoch=epoch,
            slots=slots,
            contexts=np.frombuffer(contexts[:whole], CONTEXT),
        )

    def context_tokens(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Mean context of what is queued on some slots, 0 where nobody told; shape (n,)."""
        if not self.contexts.size:
            return np.zeros(len(slots), np.int64)
        known = self.contexts.take(slots, mode="clip")
        return np.where(slots < len(self.contexts), known, 0).astype(np.int64)

    def columns(
        self, slots: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The records of some slots, turned: all whole numbers at once, all times at once.

        A fleet of a few instances pays for each call of numpy, not for what it works on.

        Args:
            slots: slot indexes; shape (n,).

        Returns:
            Rows in the order of COUNTERS_RECORD; shapes (COUNTS, n) and (TIMES, n).
        """
        words = self.slots.view("<u4").reshape(-1, COUNTERS_RECORD.itemsize // 4).take(slots, 0)
        counts, times = words.T[:COUNTS], words.view("<f8").T[-TIMES:]
        return counts.astype(np.int64, order="C"), times


def _pack_map(record: Any) -> bytes:
    return bytes(msgpack.packb({"v": SCHEMA_VERSION, **asdict(record)}))


def _known(cls: type[Any], raw: bytes) -> dict[str, Any]:
    values = msgpack.unpackb(raw)
    if not isinstance(values, dict):
        raise TypeError(f"a {cls.__name__} is a map, not {type(values).__name__}")
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """What all instances and routers of a fleet share; fixed by the first instance that joins."""

    fleet_id: FleetId
    model_scope: str  # primary served model name
    block_size_tokens: int  # canonical
    partitions: int
    bucket_bits: int  # a partition has 2 ** bucket_bits buckets
    epoch: int


class Role(StrEnum):
    """What an instance is for, where prefill and decode are apart."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """What routers know about an instance beside its counters."""

    instance_id: InstanceId
    url: str  # base URL under which routers reach the engine, without a path
    models: list[str]  # served model names, primary first
    model_root: str  # where its tokenizer and template come from; a path or a hub name
    block_size_tokens: int  # the engine's own
    adapters: list[str] | None = None  # LoRA adapter names
    max_model_len_tokens: int | None = None
    capacity_blocks: int | None = None  # device blocks of the engine's own size
    data_parallel_rank: int | None = None  # None: the engine has one rank and needs no pin
    engine_version: str | None = None
    prefill_tokens_per_s: float | None = None  # alone on its device; None: not known
    learned: bool = False  # it tells of no blocks: its index is learned from what routers notice
    role: str = Role.BOTH  # a Role; whoever does not know the word sends the instance nothing
    tier_tokens_per_s: float | None = None  # how fast it loads KV$ from a tier; None: it has none
    tier_latency_s: float = 0.0  # of such a load, beside that
    tier_shared: bool = False  # it can load what any instance of the fleet has written to its tier

    def encode(self) -> bytes:
        """Msgpack map with field names and the schema version."""
        return _pack_map(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Tolerant reader.

        Raises:
            TypeError: a required field is missing or the value is not a map.
        """
        return cls(**_known(cls, raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a router tells a sidecar: a report that differs from a prediction, or a computed chain.

    The second is for blocks of which no event tells: text chunks in place of token ids, and engines
    without events. Its predicted and actual tokens are 0, so whoever does not know it sees no
    difference in it.

    Attributes:
        decided_s: Redis time at which the index was asked.
        predicted_tokens: hit tokens by the index.
        actual_tokens: cached tokens by the engine's usage.
        hashes: the prompt's chain of canonical block hashes, concatenated, from its first block to
            at least the deeper of both; of a computed chain from `first_block` to its end.
        computed: the engine has computed this chain by now.
        first_block: place of the first of the hashes in its chain; above 0 that one is in the index
            already, by what the router saw.
    """

    decided_s: float
    predicted_tokens: int
    actual_tokens: int
    hashes: bytes
    computed: bool = False
    first_block: int = 0

    def encode(self) -> bytes:
        """Msgpack map with field names and the schema version."""
        return _pack_map(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Tolerant reader.

        Raises:
            TypeError: a required field is missing or the value is not a map.
            ValueError: it is not msgpack.
        """
        return cls(**_known(cls, raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an operator wishes of an engine, told to its sidecar as a notice by way of a router.

    Attributes:
        draining: no new request shall come; false: requests shall come again.
    """

    draining: bool

    def encode(self) -> bytes:
        """Msgpack map with field names and the schema version."""
        return _pack_map(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """Tolerant reader; None for a notice that is something else."""
        try:
            values = msgpack.unpackb(raw)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            return None
        draining = values.get("draining") if isinstance(values, dict) else None
        return cls(draining=draining) if isinstance(draining, bool) else None


def slot_view(row: np.void, now_s: float) -> dict[str, Any]:
    """Counters of one slot with names, for operators; ages and leases relative to now_s."""
    published_s = float(row["published_s"])
    return {
        "generation": int(row["generation"]),
        "flags": [str(flag.name) for flag in SlotFlag if flag & int(row["flags"])],
        "lease_left_s": round(float(row["lease_until_s"]) - now_s, 3),
        "reserved_requests": int(row["reserved_requests"]),
        "reserved_prefill_tokens": int(row["reserved_prefill_tokens"]),
        "foreign_requests": int(row["foreign_requests"]),
        "running_count": int(row["running_count"]),
        "waiting_count": int(row["waiting_count"]),
        "kv_usage_ratio": int(row["kv_usage_millionths"]) / 1e6,
        "index_blocks": int(row["index_blocks"]),
        "completeness_ratio": int(row["completeness_millionths"]) / 1e6,
        "counters_age_s": round(now_s - published_s, 3) if published_s else None,
    }
