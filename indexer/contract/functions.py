"""The Redis Functions of the contract: loading them, and one typed builder per function.

A builder returns a `Call`; `run` sends it, loads the libraries when the server does not know them
(first start, failover, flush) and retries once. Meaning, cost and return value of each function are
in the header above its Lua source.
"""

from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError, ResponseError

from indexer.contract import keys, reservations
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, FleetId, SlotIndex
from indexer.contract.limits import (
    BLOCK_HASH_BYTES,
    BLOCKS_PER_LOOKUP_MAX,
    BLOCKS_PER_WRITE_MAX,
    DIRECTORY_TTL_S,
    INSTANCE_LEASE_TTL_S,
    NOTICE_TTL_S,
    NOTICES_PER_SLOT_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.records import (
    EngineCounters,
    FleetRecord,
    HeartbeatReply,
    IndexCounters,
    SlotFlag,
)

LOOKUP: Final = "ts1_lookup"
"""The one function that replicas may answer; a little late is still a good prediction."""

LIBRARIES: Final = ("index_v1.lua", "fleet_v1.lua", "upkeep_v1.lua")
_HALVES: Final = {"fleet_v1.lua": ("fleet_v1.lua", "reservations_v1.lua")}
"""A library whose source is in two files."""


class RedisClient(Protocol):
    """What is needed of a client; redis-py's asyncio clients have it."""

    async def execute_command(self, *args: Any) -> Any:
        """Send one command and return its answer, bytes undecoded."""
        ...


class BatchClient(RedisClient, Protocol):
    """What is needed to send several commands at once; `link.Link` has it."""

    async def execute(self, commands: Iterable["Command"]) -> list[Any]:
        """Send them in one round trip; the answers in order, a refusal is raised after all."""
        ...


REDIS_WEATHER: Final = (RedisError, OSError, TimeoutError)
"""What a call may raise while Redis is away, slow, failing over, loading or out of memory."""


Command = Sequence[bytes | str | float]


def library_text(name: str) -> str:
    """Source of one library."""
    folder = resources.files("indexer.contract")
    return "\n".join(folder.joinpath(part).read_text() for part in _HALVES.get(name, (name,)))


async def load(redis: RedisClient) -> None:
    """Load or replace all libraries; loading identical text again changes nothing."""
    for name in LIBRARIES:
        await redis.execute_command("FUNCTION", "LOAD", "REPLACE", library_text(name))


async def run(redis: RedisClient, call: Call) -> Any:
    """Send a call; raises what redis-py raises. The caller sets the deadline."""
    try:
        return await redis.execute_command(*call.command())
    except ResponseError as error:
        if not is_missing(error):
            raise
    await load(redis)
    return await redis.execute_command(*call.command())


async def run_all(redis: BatchClient, calls: Sequence[Call]) -> list[Any]:
    """Send several calls in one round trip, as `run` sends one; executed in order.

    Each may be executed twice, where the libraries were missing.

    Raises:
        ResponseError: Redis refused one of them; the others were executed.
    """
    commands = [call.command() for call in calls]
    try:
        return await redis.execute(commands)
    except ResponseError as error:
        if not is_missing(error):
            raise
    await load(redis)
    return await redis.execute(commands)


def is_missing(error: Exception) -> bool:
    """Whether a server answered that it does not know the function."""
    return "function not found" in str(error).lower()


OUT_OF_ORDER: Final = 2
"""Answer of a store or removal whose predecessor was not executed."""


# -- the index of one partition -------------------------------------------------------------------


def anchor(fleet: FleetRecord, partition: int) -> str:
    """Key of an index partition, which its functions derive all others from."""
    return keys.partition(fleet.fleet_id, partition, fleet.partitions)


def lookup(fleet: FleetRecord, partition: int, hashes: bytes) -> Call:
    """Leading blocks of a chain held by each instance of a partition; see `depths`."""
    count = len(hashes) // BLOCK_HASH_BYTES
    assert count <= BLOCKS_PER_LOOKUP_MAX, count
    return Call(LOOKUP, (anchor(fleet, partition),), (fleet.bucket_bits, hashes), read_only=True)


def depths(reply: Sequence[Any], out: npt.NDArray[np.int64]) -> None:
    """Write a lookup's reply into an array of leading blocks per local slot.

    Args:
        reply: what `lookup` returned.
        out: shape (SLOTS_PER_PARTITION_MAX,), zeroed by the caller.
    """
    for depth, holders in zip(reply[::2], reply[1::2], strict=True):
        listed = np.frombuffer(holders, np.uint8)
        if len(holders) == SLOTS_PER_PARTITION_MAX // 8:
            out[np.flatnonzero(np.unpackbits(listed, bitorder="little"))] = depth
        else:
            out[listed] = depth


def _write(
    function: str,
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    hashes: Sequence[BlockHash],
    *,
    after: BlockHash | None,
) -> Call:
    assert len(hashes) <= BLOCKS_PER_WRITE_MAX, len(hashes)
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    args = (fleet.bucket_bits, local, generation, b"".join(hashes), after or b"")
    return Call(function, (anchor(fleet, partition),), args)


def store(
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    hashes: Sequence[BlockHash],
    *,
    after: BlockHash | None = None,
) -> Call:
    """Publish blocks of an instance, parents before children.

    Args:
        fleet: the fleet.
        slot: the instance's.
        generation: of the slot.
        hashes: at most BLOCKS_PER_WRITE_MAX.
        after: last block of the call before in the same write. When that call was refused (a server
            out of memory refuses one and takes the next), this one does nothing and answers
            OUT_OF_ORDER, so that no child is stored without its parent.
    """
    return _write("ts1_store", fleet, slot, generation, hashes, after=after)


def remove(
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    hashes: Sequence[BlockHash],
    *,
    after: BlockHash | None = None,
) -> Call:
    """Take published blocks of an instance back, children before parents; see `store`."""
    return _write("ts1_remove", fleet, slot, generation, hashes, after=after)


def open_slot(fleet: FleetRecord, slot: SlotIndex, generation: int) -> Call:
    """Let a generation of a slot write to the index."""
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    return Call("ts1_open", (anchor(fleet, partition),), (local, generation))


def sweep(
    fleet: FleetRecord, slot: SlotIndex, generation: int, first_bucket: int, buckets: int
) -> Call:
    """End a generation's right to write, and take its slot out of a run of buckets (0: of none)."""
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    return Call(
        "ts1_sweep", (anchor(fleet, partition),), (local, generation, first_bucket, buckets)
    )


# -- membership and counters ----------------------------------------------------------------------


def create(fleet: FleetRecord) -> Call:
    """Found a fleet, or learn what it is; see `fleet_record`."""
    return Call(
        "ts1_create",
        (keys.fleet(fleet.fleet_id), keys.counters(fleet.fleet_id)),
        (
            fleet.model_scope,
            fleet.block_size_tokens,
            fleet.partitions,
            fleet.bucket_bits,
            fleet.epoch.to_bytes(8, "little"),
            DIRECTORY_TTL_S,
        ),
    )


FLEET_FIELDS: Final = ("model_scope", "block_size_tokens", "partitions", "bucket_bits", "epoch")
"""Of the hash at `keys.fleet`, in the order in which `create` returns them."""


def fleet_record(fleet: FleetId, reply: Sequence[Any]) -> FleetRecord:
    """Decode what `create` returned, or FLEET_FIELDS read with HMGET."""
    scope, block_size_tokens, partitions, bucket_bits, epoch = reply
    return FleetRecord(
        fleet_id=fleet,
        model_scope=scope.decode(),
        block_size_tokens=int(block_size_tokens),
        partitions=int(partitions),
        bucket_bits=int(bucket_bits),
        epoch=int.from_bytes(epoch, "little"),
    )


async def read_fleet(redis: RedisClient, fleet: FleetId) -> FleetRecord | None:
    """The fleet's record as it is now; None when there is no such fleet."""
    reply = await redis.execute_command("HMGET", keys.fleet(fleet), *FLEET_FIELDS)
    return None if None in reply else fleet_record(fleet, reply)


def join(fleet: FleetId, record: bytes, *, former: tuple[SlotIndex, int] | None = None) -> Call:
    """Take a slot for an instance.

    Args:
        fleet: the fleet.
        record: from `InstanceRecord.encode`.
        former: slot and generation given up in the same step, so that one engine is never two.
    """
    return Call(
        "ts1_join",
        (keys.fleet(fleet), keys.counters(fleet), keys.instances(fleet)),
        (record, INSTANCE_LEASE_TTL_S, DIRECTORY_TTL_S, SLOTS_PER_PARTITION_MAX, *(former or ())),
    )


def heartbeat(
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    *,
    state: SlotFlag | None = None,
    index: IndexCounters | None = None,
    counters: EngineCounters | None,
) -> Call:
    """Renew an instance's lease and publish its counters; see `heartbeat_reply`.

    Args:
        fleet: the fleet.
        slot: the instance's.
        generation: of the slot.
        state: DRAINING, SLEEPING or nothing.
        index: its part of the index; None before anything is known.
        counters: its engine's; None when the engine's metrics are not known.
    """
    index = index or IndexCounters(blocks=0, completeness_ratio=0.0)
    args: tuple[bytes | str | int | float, ...] = (
        slot,
        generation,
        fleet.epoch.to_bytes(8, "little"),
        INSTANCE_LEASE_TTL_S,
        DIRECTORY_TTL_S,
        int(state or 0),
        index.blocks,
        round(index.completeness_ratio * 1_000_000),
    )
    if counters is not None:
        kv_usage_millionths = round(counters.kv_usage_ratio * 1_000_000)
        args += (counters.running_count, counters.waiting_count, kv_usage_millionths)
    key = fleet.fleet_id
    anchors = (keys.fleet(key), keys.counters(key), keys.instances(key))
    return Call("ts1_heartbeat", (*anchors, keys.notices(key, slot), keys.budgets(key)), args)


def heartbeat_reply(reply: Sequence[Any]) -> HeartbeatReply | None:
    """Decode what `heartbeat` returned; None when the slot is lost."""
    if not reply:
        return None
    requests, tokens, budget_blocks, seconds, microseconds, notices = reply
    return HeartbeatReply(
        reserved_requests=int(requests),
        reserved_prefill_tokens=int(tokens),
        budget_blocks=None if budget_blocks < 0 else int(budget_blocks),
        now_s=int(seconds) + int(microseconds) / 1e6,
        notices=tuple(notices),
    )


def notice(fleet: FleetId, slot: SlotIndex, generation: int, packed: bytes) -> Call:
    """Tell a slot's sidecar that its engine's report differs; packed from `Notice.encode`."""
    args = (slot, generation, packed, NOTICES_PER_SLOT_MAX, NOTICE_TTL_S)
    return Call("ts1_notice", (keys.counters(fleet), keys.notices(fleet, slot)), args)


def announce(fleet: FleetId, slot: SlotIndex, generation: int, record: bytes) -> Call:
    """Replace an instance's record."""
    return Call(
        "ts1_announce", (keys.counters(fleet), keys.instances(fleet)), (slot, generation, record)
    )


def close(fleet: FleetId, slot: SlotIndex, generation: int, grace_s: float) -> Call:
    """Stop using a slot; grace_s -1 for one's own, else how long its lease must have been dead."""
    return Call("ts1_close", (keys.counters(fleet),), (slot, generation, grace_s))


def free(fleet: FleetId, slot: SlotIndex, generation: int) -> Call:
    """Hand a closed and swept slot out again."""
    return Call("ts1_free", (keys.counters(fleet), keys.instances(fleet)), (slot, generation))


# -- reservations, counters, siblings: in reservations.py -----------------------------------------

read = reservations.read
fleet_counters = reservations.fleet_counters
siblings = reservations.siblings
register = reservations.register
reserve = reservations.reserve
prefilled = reservations.prefilled
release = reservations.release
sync = reservations.sync
reap = reservations.reap
CANDIDATE: Final = reservations.CANDIDATE
CANDIDATE_STATE: Final = reservations.CANDIDATE_STATE
RESERVATION: Final = reservations.RESERVATION
