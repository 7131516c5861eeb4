"""Membership, counters and notices of a fleet: one builder per function, run by `functions.py`."""

import re
from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import RedisError, ResponseError

from indexer.contract import block_hash, keys
from indexer.contract.call import Call
from indexer.contract.functions import RedisClient
from indexer.contract.identifiers import BlockHash, FleetId, RouterId, SlotIndex
from indexer.contract.limits import (
    BUCKET_BITS_MAX,
    DIRECTORY_TTL_S,
    INSTANCE_LEASE_TTL_S,
    NOTICE_TTL_S,
    NOTICES_PER_SLOT_MAX,
    PARTITIONS_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.records import (
    EngineCounters,
    FleetRecord,
    HeartbeatReply,
    IndexCounters,
    SlotFlag,
    TooLate,
)

_UNDECODED: Final = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class Unreadable(RedisError):  # noqa: N818
    """What Redis holds is not what the contract says; others than a fleet's owners wrote it."""


class Reading:
    """See `reading`."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _UNDECODED):
            raise Unreadable(f"{type(error).__name__}: {error}") from error
        if isinstance(error, ResponseError):
            said = str(error)
            if "WRONGTYPE" in said or "script:" in said:
                raise Unreadable(said) from error


def reading() -> Reading:
    """Reads and decodes what Redis holds of one fleet, `with` it.

    Raises:
        Unreadable: it cannot be decoded, or is of another type.
    """
    return Reading()


def fleet_id(member: bytes) -> FleetId:
    """Decode a member of the directory.

    Raises:
        ValueError: it is no fleet's id.
    """
    if not re.fullmatch(rb"[0-9a-f]{16}", member):
        raise ValueError(f"{member[:32]!r} is not a fleet id")
    return FleetId(member.decode())


def create(fleet: FleetRecord) -> Call:
    """Found a fleet, or learn what it is; see `fleet_record`."""
    return Call(
        "ts1_create",
        (
            keys.fleet(fleet.fleet_id),
            keys.counters(fleet.fleet_id),
            keys.instances(fleet.fleet_id),
        ),
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
    """Decode what `create` returned, or FLEET_FIELDS read with HMGET.

    Raises:
        ValueError: a field is not what it has to be.
    """
    scope, block_size_tokens, partitions, bucket_bits, epoch = reply
    record = FleetRecord(
        fleet_id=fleet,
        model_scope=scope.decode(),
        block_size_tokens=int(block_size_tokens),
        partitions=int(partitions),
        bucket_bits=int(bucket_bits),
        epoch=int.from_bytes(epoch, "little"),
    )
    if record.block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {record.block_size_tokens}")
    if not 1 <= record.partitions <= PARTITIONS_MAX:
        raise ValueError(f"partitions is {record.partitions}")
    if not 0 <= record.bucket_bits <= BUCKET_BITS_MAX:
        raise ValueError(f"bucket_bits is {record.bucket_bits}")
    return record


async def read_fleet(redis: RedisClient, fleet: FleetId) -> FleetRecord | None:
    """The fleet's record as it is now; None when there is no such fleet."""
    reply = await redis.execute_command("HMGET", keys.fleet(fleet), *FLEET_FIELDS)
    return None if None in reply else fleet_record(fleet, reply)


def join(
    fleet: FleetId,
    record: bytes,
    *,
    state: SlotFlag = SlotFlag(0),  # noqa: B008 - immutable
    former: tuple[SlotIndex, int] | None = None,
) -> Call:
    """Take a slot for an instance.

    Args:
        fleet: the fleet.
        record: from `InstanceRecord.encode`.
        state: DRAINING, SLEEPING or SlotFlag(0); it holds from the first moment, so no request
            comes before the first heartbeat that could not be taken.
        former: slot and generation given up in the same step, so that one engine is never two.
    """
    limits = (INSTANCE_LEASE_TTL_S, DIRECTORY_TTL_S, SLOTS_PER_PARTITION_MAX)
    return Call(
        "ts1_join",
        (keys.fleet(fleet), keys.counters(fleet), keys.instances(fleet)),
        (record, *limits, int(state), *(former or ())),
    )


def heartbeat(
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    *,
    state: SlotFlag,
    index: IndexCounters,
    counters: EngineCounters | None,
    stored: Sequence[BlockHash] = (),
    known_s: float | None = None,
) -> Call:
    """Renew an instance's lease and publish its counters; see `heartbeat_reply`.

    Args:
        fleet: the fleet.
        slot: the instance's.
        generation: of the slot.
        state: DRAINING, SLEEPING or SlotFlag(0).
        index: its part of the index.
        counters: its engine's; None when the engine's metrics are not known.
        stored: of the blocks awaited on the slot those that its engine has stored; at most
            AWAITED_PER_HEARTBEAT_MAX.
        known_s: Redis time at which this was true; a lease later it is refused. None: whenever.
    """
    args: tuple[bytes | str | int | float, ...] = (
        slot,
        generation,
        fleet.epoch.to_bytes(8, "little"),
        INSTANCE_LEASE_TTL_S,
        DIRECTORY_TTL_S,
        int(state),
        index.blocks,
        round(index.completeness_ratio * 1_000_000),
        keys.ledger(fleet.fleet_id, RouterId("")),
        b"".join(stored),
        "" if known_s is None else known_s,
    )
    if counters is not None:
        kv_usage_millionths = round(counters.kv_usage_ratio * 1_000_000)
        args += (counters.running_count, counters.waiting_count, kv_usage_millionths)
    key = fleet.fleet_id
    anchors = (keys.fleet(key), keys.counters(key), keys.instances(key))
    mail = (keys.notices(key, slot), keys.budgets(key), keys.awaited(key, slot))
    return Call("ts1_heartbeat", (*anchors, *mail), args)


def heartbeat_reply(reply: Sequence[Any]) -> HeartbeatReply | TooLate | None:
    """Decode what `heartbeat` returned; None when the slot is lost."""
    if not reply:
        return None
    try:
        seconds, microseconds = reply
    except ValueError:
        return _renewed(reply)
    return TooLate(now_s=int(seconds) + int(microseconds) / 1e6)


def _renewed(reply: Sequence[Any]) -> HeartbeatReply:
    requests, tokens, budget_blocks, seconds, microseconds, notices, awaited, ended, instances = (
        reply
    )
    return HeartbeatReply(
        reserved_requests=int(requests),
        reserved_prefill_tokens=int(tokens),
        budget_blocks=None if budget_blocks < 0 else int(budget_blocks),
        now_s=int(seconds) + int(microseconds) / 1e6,
        notices=tuple(notices),
        awaited=tuple(block_hash.split(awaited)),
        prefills_ended_count=int(ended),
        fleet_instances_count=int(instances),
    )


def notice(fleet: FleetId, slot: SlotIndex, generation: int, packed: bytes) -> Call:
    """Tell a slot's sidecar something; packed from `Notice.encode` or `Wish.encode`."""
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
