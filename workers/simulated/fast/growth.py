"""Blocks for requests that go on: taken, filled, and what that changed. Pure.

Changes are signed as in `BlockChanges`. The caller has seen to it that the free blocks suffice.
"""

import numpy as np

from workers.simulated.fast.block_columns import EMPTY, BlockColumns, Identities
from workers.simulated.fast.decoders import Decoders
from workers.simulated.fast.request import ActiveChain


def extend(
    pool: BlockColumns,
    active: ActiveChain,
    end_tokens: int,
    block_size_tokens: int,
    changes: list[Identities],
) -> None:
    """Blocks for a prompt up to here; full ones become resident. Appends to the changes."""
    lacking = -(-end_tokens // block_size_tokens) - active.held_count
    if lacking > 0:
        taken, evicted = pool.allocate(lacking)
        active.held[active.held_count : active.held_count + lacking] = taken
        active.held_count += lacking
        changes.append(~evicted[evicted != EMPTY])
    start, full = active.stored_blocks, end_tokens // block_size_tokens
    if full > start:
        stored = active.request.blocks[start:full]
        pool.store(active.held[start:full], stored, active.request.category)
        active.stored_blocks = full
        changes.append(stored)


def take_turn(pool: BlockColumns, active: ActiveChain, *, fills: bool) -> list[int]:
    """A decoding request fills its last block or takes one more; returns the changes."""
    if fills:
        identity = active.unstored.pop()
        pool.store(np.array(active.grown[-1:]), np.array([identity]), active.request.category)
        return [identity]
    taken, evicted = pool.allocate(1)
    active.grown.append(int(taken[0]))
    signed: list[int] = (~evicted[evicted != EMPTY]).tolist()
    return signed


def take_turns(
    pool: BlockColumns, decoders: Decoders, first: int, last: int
) -> tuple[list[int], list[int]]:
    """All turns of the steps with offsets first .. last - 1: changes, and the offset of each.

    Blocks are taken together before any is stored, which comes to the same: what one step stores is
    held, so no later step evicts it. Where it matters to the order what has been stored, every turn
    is on its own.
    """
    if pool.order.in_turns:
        return _take_turns_apart(pool, decoders, first, last)
    taken: list[int] = []
    evicted: list[int] = []
    if needed := decoders.blocks_needed(first, last):
        block_ids, identities = pool.allocate(needed)
        taken, evicted = block_ids.tolist(), identities.tolist()
    signed, offsets, filled, names = [], [], [], []
    place = 0
    for offset, fills, active in decoders.turns(first, last):
        if fills:
            name = active.unstored.pop()
            names.append(name)
            filled.append(active.grown[-1])
            signed.append(name)
            offsets.append(offset)
            continue
        active.grown.append(taken[place])
        if evicted[place] != EMPTY:
            signed.append(~evicted[place])
            offsets.append(offset)
        place += 1
    if filled:
        pool.store_alike(np.array(filled), np.array(names))
    return signed, offsets


def _take_turns_apart(
    pool: BlockColumns, decoders: Decoders, first: int, last: int
) -> tuple[list[int], list[int]]:
    signed: list[int] = []
    offsets: list[int] = []
    for offset, fills, active in decoders.turns(first, last):
        changed = take_turn(pool, active, fills=fills)
        signed += changed
        offsets += [offset] * len(changed)
    return signed, offsets
