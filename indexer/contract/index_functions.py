"""The index of one partition: one builder per function, as in `fleet_functions.py`."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from indexer.contract import block_hash, keys
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import (
    BLOCK_HASH_BYTES,
    BLOCKS_PER_LOOKUP_MAX,
    BLOCKS_PER_WRITE_MAX,
    INDEX_TTL_S,
    KEEP_BUCKETS_PER_CALL_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.records import FleetRecord

LOOKUP: Final = "ts1_lookup"
"""The one function that replicas may answer; a little late is still a good prediction."""

OUT_OF_ORDER: Final = 2
"""Answer of a store or removal whose predecessor was not executed."""


def anchor(fleet: FleetRecord, partition: int) -> str:
    """Key of an index partition, which its functions derive all others from."""
    return keys.partition(fleet.fleet_id, partition, fleet.partitions)


def lookup(fleet: FleetRecord, partition: int, hashes: bytes) -> Call:
    """Leading blocks of a chain held by each instance of a partition; see `depths`."""
    count = len(hashes) // BLOCK_HASH_BYTES
    assert count <= BLOCKS_PER_LOOKUP_MAX, count
    return Call(LOOKUP, (anchor(fleet, partition),), (fleet.bucket_bits, hashes), read_only=True)


def lookups(fleet: FleetRecord, hashes: bytes, *, together: bool, tier: bool = False) -> list[Call]:
    """A lookup in all partitions; see `all_depths`.

    Args:
        fleet: the fleet.
        hashes: of a chain; none are asked for b"".
        together: in one call, which a server takes that has all partitions; else in one for each.
        tier: what the instances have written to their tiers, not what their devices hold.
    """
    if not hashes:
        return []
    named = block_hash.tier_chain(hashes) if tier else hashes
    partitions = range(fleet.partitions)
    if not together or fleet.partitions == 1:
        return [lookup(fleet, partition, named) for partition in partitions]
    anchors = tuple(anchor(fleet, partition) for partition in partitions)
    return [Call("ts1_lookups", anchors, (fleet.bucket_bits, named), read_only=True)]


def all_depths(calls: Sequence[Call], replies: Sequence[Any], out: npt.NDArray[np.int64]) -> None:
    """Write the replies of `lookups` into a zeroed array of leading blocks per slot."""
    if calls and calls[0].function != LOOKUP:
        (replies,) = replies
    for partition, reply in enumerate(replies):
        first = partition * SLOTS_PER_PARTITION_MAX
        depths(reply, out[first : first + SLOTS_PER_PARTITION_MAX])


def depths(reply: Sequence[Any], out: npt.NDArray[np.int64]) -> None:
    """Write a lookup's reply into an array of leading blocks per local slot.

    Args:
        reply: what `lookup` returned.
        out: shape (SLOTS_PER_PARTITION_MAX,), zeroed by the caller.
    """
    for depth, holders in zip(reply[::2], reply[1::2], strict=True):
        if len(holders) == SLOTS_PER_PARTITION_MAX // 8:
            listed = np.unpackbits(np.frombuffer(holders, np.uint8), bitorder="little")
            out[listed.nonzero()[0]] = depth
        else:
            out[list(holders)] = depth


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
    args = (fleet.bucket_bits, local, generation, b"".join(hashes), after or b"", INDEX_TTL_S)
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
    return Call("ts1_open", (anchor(fleet, partition),), (local, generation, INDEX_TTL_S))


def keep(fleet: FleetRecord, partition: int, first_bucket: int, buckets: int) -> Call:
    """Put off the expiry of a partition's anchor and of a run of its buckets."""
    assert buckets <= KEEP_BUCKETS_PER_CALL_MAX, buckets
    return Call("ts1_keep", (anchor(fleet, partition),), (first_bucket, buckets, INDEX_TTL_S))


def sweep(
    fleet: FleetRecord, slot: SlotIndex, generation: int, first_bucket: int, buckets: int
) -> Call:
    """End a generation's right to write, and take its slot out of a run of buckets (0: of none)."""
    partition, local = divmod(slot, SLOTS_PER_PARTITION_MAX)
    return Call(
        "ts1_sweep", (anchor(fleet, partition),), (local, generation, first_bucket, buckets)
    )
