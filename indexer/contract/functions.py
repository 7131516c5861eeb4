"""The Redis Functions of the contract: loading them, and one typed builder per function.

A builder returns a `Call`; `run` sends it, loads the libraries when the server does not know them
(first start, failover, flush) and retries once. Meaning, cost and return value of each function are
in the header above its Lua source.
"""

import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError, ResponseError

from indexer.contract import keys
from indexer.contract.identifiers import BlockHash, FleetId, RouterId, SlotIndex
from indexer.contract.limits import (
    BLOCK_HASH_BYTES,
    BLOCKS_PER_LOOKUP_MAX,
    BLOCKS_PER_WRITE_MAX,
    CANDIDATES_PER_RESERVE_MAX,
    DIRECTORY_TTL_S,
    INSTANCE_LEASE_TTL_S,
    NOTICE_TTL_S,
    NOTICES_PER_SLOT_MAX,
    ROUTER_LEASE_TTL_S,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.records import (
    EngineCounters,
    FleetCounters,
    FleetRecord,
    HeartbeatReply,
    IndexCounters,
    SlotFlag,
)

LIBRARIES: Final = ("index_v1.lua", "fleet_v1.lua")
LEDGER_TTL_S: Final = 2 * DIRECTORY_TTL_S
"""A ledger outlives the counters it has booked on, so it is reaped, never merely forgotten."""

CANDIDATE: Final = np.dtype(
    [("slot", "<u2"), ("generation", "<u4"), ("new_prefill_tokens", "<u4")], align=False
)
CANDIDATE_STATE: Final = np.dtype([("queued_prefill_tokens", "<u4"), ("batch_size", "<u4")])
RESERVATION: Final = struct.Struct("<HIIB")
"""slot, generation, prefill tokens still queued, state (0 prefill, 1 decode)"""

assert (CANDIDATE.itemsize, RESERVATION.size) == (10, 11), "the Lua source reads these sizes"


class RedisClient(Protocol):
    """What is needed of a client; redis-py's asyncio clients have it."""

    async def execute_command(self, *args: Any) -> Any:
        """Send one command and return its answer, bytes undecoded."""
        ...


REDIS_WEATHER: Final = (RedisError, OSError, TimeoutError)
"""What a call may raise while Redis is away, slow, failing over, loading or out of memory."""


@dataclass(frozen=True, slots=True)
class Call:
    """One function call, ready to send."""

    function: str
    keys: tuple[str, ...]
    args: tuple[bytes | str | int | float, ...]
    read_only: bool = False

    def command(self) -> tuple[bytes | str | int | float, ...]:
        """The whole command, for a client or a pipeline."""
        verb = "FCALL_RO" if self.read_only else "FCALL"
        return (verb, self.function, len(self.keys), *self.keys, *self.args)


Command = Sequence[bytes | str | float]
SendAll = Callable[[Sequence[Command]], Awaitable[list[Any]]]


def library_text(name: str) -> str:
    """Source of one library."""
    return resources.files("indexer.contract").joinpath(name).read_text()


async def load(redis: RedisClient) -> None:
    """Load or replace both libraries; loading identical text again changes nothing."""
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


async def run_all(send: SendAll, redis: RedisClient, calls: Sequence[Call]) -> list[Any]:
    """Send several calls in one round trip, as `run` sends one.

    Args:
        send: commands -> their answers in order; a refusal may be raised or stand in the list.
        redis: for loading the libraries.
        calls: executed in order.

    Raises:
        ResponseError: Redis refused one of them; the others were executed.
    """
    commands = [call.command() for call in calls]
    replies, refused = await _answers(send, commands)
    if refused is not None and is_missing(refused):
        await load(redis)
        replies, refused = await _answers(send, commands)
    if refused is not None:
        raise refused
    return replies


async def _answers(
    send: SendAll, commands: Sequence[Command]
) -> tuple[list[Any], ResponseError | None]:
    try:
        replies = await send(commands)
    except ResponseError as error:
        return [], error
    return replies, next((reply for reply in replies if isinstance(reply, ResponseError)), None)


def is_missing(error: Exception) -> bool:
    """Whether a server answered that it does not know the function."""
    return "function not found" in str(error).lower()


# -- the index of one partition -------------------------------------------------------------------


def lookup(fleet: FleetRecord, partition: int, hashes: bytes) -> Call:
    """Leading blocks of a chain held by each instance of a partition; see `depths`."""
    count = len(hashes) // BLOCK_HASH_BYTES
    assert count <= BLOCKS_PER_LOOKUP_MAX, count
    anchor = keys.partition(fleet.fleet_id, partition)
    return Call("ts1_lookup", (anchor,), (fleet.bucket_bits, hashes), read_only=True)


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
    function: str, fleet: FleetRecord, slot: SlotIndex, generation: int, hashes: Sequence[BlockHash]
) -> Call:
    assert len(hashes) <= BLOCKS_PER_WRITE_MAX, len(hashes)
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    anchor = keys.partition(fleet.fleet_id, partition)
    return Call(function, (anchor,), (fleet.bucket_bits, local, generation, b"".join(hashes)))


def store(
    fleet: FleetRecord, slot: SlotIndex, generation: int, hashes: Sequence[BlockHash]
) -> Call:
    """Publish blocks of an instance, parents before children."""
    return _write("ts1_store", fleet, slot, generation, hashes)


def remove(
    fleet: FleetRecord, slot: SlotIndex, generation: int, hashes: Sequence[BlockHash]
) -> Call:
    """Take published blocks of an instance back, children before parents."""
    return _write("ts1_remove", fleet, slot, generation, hashes)


def open_slot(fleet: FleetId, slot: SlotIndex, generation: int) -> Call:
    """Let a generation of a slot write to the index."""
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    return Call("ts1_open", (keys.partition(fleet, partition),), (local, generation))


def sweep(
    fleet: FleetId, slot: SlotIndex, generation: int, first_bucket: int, buckets: int
) -> Call:
    """End a generation's right to write, and take its slot out of a run of buckets (0: of none)."""
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    anchor = keys.partition(fleet, partition)
    return Call("ts1_sweep", (anchor,), (local, generation, first_bucket, buckets))


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


def join(fleet: FleetId, record: bytes) -> Call:
    """Take a slot for an instance; record from `InstanceRecord.encode`."""
    return Call(
        "ts1_join",
        (keys.fleet(fleet), keys.counters(fleet), keys.instances(fleet)),
        (record, INSTANCE_LEASE_TTL_S, DIRECTORY_TTL_S, SLOTS_PER_PARTITION_MAX),
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


def read(fleet: FleetId) -> Call:
    """The counters of the whole fleet; see `fleet_counters`."""
    return Call("ts1_read", (keys.counters(fleet),), (), read_only=True)


def fleet_counters(reply: Sequence[Any]) -> FleetCounters | None:
    """Decode what `read` returned; None when the fleet has no counters.

    Raises:
        ValueError: the bytes are not counters of this schema version.
    """
    seconds, microseconds, raw = reply
    if not raw:
        return None
    return FleetCounters.decode(raw, int(seconds) + int(microseconds) / 1e6)


# -- reservations ---------------------------------------------------------------------------------


def _books(fleet: FleetId, router: RouterId) -> tuple[str, str, str]:
    return keys.counters(fleet), keys.routers(fleet), keys.ledger(fleet, router)


def register(fleet: FleetId, router: RouterId, *, begin: bool) -> Call:
    """Begin or renew a router's lease."""
    return Call(
        "ts1_register",
        (keys.routers(fleet), keys.ledger(fleet, router)),
        (router, ROUTER_LEASE_TTL_S, LEDGER_TTL_S, int(begin)),
    )


def reserve(
    fleet: FleetId,
    router: RouterId,
    sequence: int,
    candidates: npt.NDArray[np.void],
    *,
    choice: int = -1,
    expected_batch_size: int = -1,
) -> Call:
    """Choose and book in one step.

    Args:
        fleet: the fleet.
        router: this router's registration.
        sequence: number of the request, unique within the registration.
        candidates: dtype CANDIDATE, equals in order of preference.
        choice: index of the only acceptable candidate; -1 lets the function take the least product.
        expected_batch_size: the choice's batch size when it was made; -1 for any.
    """
    assert 0 < len(candidates) <= CANDIDATES_PER_RESERVE_MAX, len(candidates)
    return Call(
        "ts1_reserve",
        _books(fleet, router),
        (router, sequence.to_bytes(8, "little"), candidates.tobytes(), choice, expected_batch_size),
    )


def prefilled(fleet: FleetId, router: RouterId, sequence: int) -> Call:
    """The request's prefill has ended."""
    return Call("ts1_prefilled", _books(fleet, router), (router, sequence.to_bytes(8, "little")))


def release(fleet: FleetId, router: RouterId, sequence: int) -> Call:
    """The request has ended."""
    args = (router, sequence.to_bytes(8, "little"), LEDGER_TTL_S)
    return Call("ts1_release", _books(fleet, router), args)


def sync(fleet: FleetId, router: RouterId, reservations: bytes, *, forget_tombstones: bool) -> Call:
    """Make the ledger say what its router says.

    Args:
        fleet: the fleet.
        router: this router's registration.
        reservations: 19 bytes each: sequence as little-endian u64, then RESERVATION.
        forget_tombstones: drop the marks of releases that came before their reserve.
    """
    args = (router, reservations, LEDGER_TTL_S, int(forget_tombstones))
    return Call("ts1_sync", _books(fleet, router), args)


def reap(fleet: FleetId, router: RouterId | None = None) -> Call:
    """Take back what one router has reserved; None: a router whose lease is dead, if any."""
    prefix = keys.ledger(fleet, RouterId(""))
    return Call("ts1_reap", (keys.counters(fleet), keys.routers(fleet)), (prefix, router or ""))
