"""Paged block pool with a prefix cache, in numpy columns: `BlockPool` many blocks at a time. Pure.

The laws are those of `workers.simulated.block_pool`, and so is the order of all that happens.
Content is named by a block's identity: a small non-negative integer that stands for the block's
tokens and all before them, so equal identities mean an equal prefix.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from workers.simulated.eviction.base import Category
from workers.simulated.fast.free_order import BlockIds, FreeOrder

Identities = npt.NDArray[np.int64]

EMPTY = -1  # the identity of a block without content


class BlockColumns:
    """Blocks 0 .. capacity_blocks - 1 of one instance.

    Attributes:
        capacity_blocks: number of blocks.
        order: which free block goes next; starts with all of them.
    """

    def __init__(
        self,
        capacity_blocks: int,
        order: FreeOrder,
        demote: Callable[[Identities], None] | None = None,
    ) -> None:
        """Empty blocks that are evicted in this order; `demote` takes what they held, in order."""
        self._demote = demote
        self.capacity_blocks = capacity_blocks
        self.order = order
        self._references = np.zeros(capacity_blocks, np.int32)
        self._identity = np.full(capacity_blocks, EMPTY, np.int64)
        self._has_twin = np.zeros(capacity_blocks, np.bool_)  # its identity may be held twice
        self._first = np.zeros(0, np.int32)  # identity -> the block a hit gets, + 1; 0: none
        self._copies: dict[int, list[int]] = {}  # identity -> further blocks of the same content

    @property
    def free_count(self) -> int:
        """Blocks no request holds, resident ones included."""
        return len(self.order)

    @property
    def used_count(self) -> int:
        """Blocks held by requests."""
        return self.capacity_blocks - len(self.order)

    def learn(self, identities_count: int) -> None:
        """Make room for identities below this; 4 bytes each, touched only where resident."""
        if identities_count > len(self._first):
            grown = np.zeros(max(identities_count, 2 * len(self._first)), np.int32)
            grown[: len(self._first)] = self._first
            self._first = grown

    def match(self, identities: Identities) -> BlockIds:
        """Resident blocks of the longest leading run of `identities`."""
        if not len(identities):
            return np.empty(0, np.intp)
        places = self._first.take(identities)
        end = int(places.argmin())  # the first of the smallest: of the zeros, where there are some
        if places[end]:
            end = len(places)
        found: BlockIds = places[:end].astype(np.intp) - 1
        return found

    def idle(self, block_ids: BlockIds) -> BlockIds:
        """Those of the blocks that are free, that is, would leave the free ones when held."""
        idle: BlockIds = block_ids[self._references.take(block_ids) == 0]
        return idle

    def hold(self, block_ids: BlockIds, idle: BlockIds, category: Category | None = None) -> None:
        """A request of a category hits these blocks, `idle` of which are free until now.

        Adds one reference to each.
        """
        if len(block_ids):
            self.order.touch(block_ids, category)
        if len(idle):
            self.order.revive(idle)
        self._references[block_ids] += 1

    def allocate(self, count: int) -> tuple[BlockIds, Identities]:
        """Take `count` free blocks; the caller checked `free_count`.

        Returns:
            the blocks in order, and what each held: an identity, now evicted, or EMPTY.
        """
        taken = self.order.take(count)
        held = self._identity.take(taken)
        self._references[taken] = 1
        resident = held != EMPTY
        if resident.all():
            self._forget(taken, held)
        elif resident.any():
            self._forget(taken[resident], held[resident])
        if self._demote is not None:
            self._demote(held[resident])
        return taken, held

    def store(
        self, block_ids: BlockIds, identities: Identities, category: Category | None = None
    ) -> None:
        """Make full blocks of one chain, held by the caller and without content, hittable."""
        if self.order.in_turns:
            self.order.store(block_ids, identities, category)
        self._identity[block_ids] = identities
        if self._first.take(identities).any():
            self._publish(block_ids, identities)
        else:
            self._first[identities] = (block_ids + 1).astype(np.int32)

    def store_alike(self, block_ids: BlockIds, identities: Identities) -> None:
        """`store` for blocks of several chains in order, some of which may have equal content.

        Not with an order that is `in_turns`.
        """
        assert not self.order.in_turns, "its blocks are stored one by one"
        self._identity[block_ids] = identities
        self._publish(block_ids, identities)

    def release(self, chain: BlockIds) -> None:
        """Drop one reference of each block of a chain, tail first, so that its tail goes first.

        Its last block may not be full yet and is then nobody's loss: it goes before all others.
        """
        references = self._references.take(chain) - 1
        self._references[chain] = references
        freed = chain[::-1][references[::-1] == 0]
        if len(freed) and self._identity[freed[0]] == EMPTY:
            self.order.release_empty(int(freed[0]))
            freed = freed[1:]
        self.order.release(freed)

    def _publish(self, block_ids: BlockIds, identities: Identities) -> None:
        first = self._first
        for block_id, identity in zip(block_ids.tolist(), identities.tolist(), strict=True):
            holder = int(first[identity]) - 1
            if holder < 0:
                first[identity] = block_id + 1
            else:
                self._copies.setdefault(identity, []).append(block_id)
                self._has_twin[holder] = self._has_twin[block_id] = True

    def _forget(self, block_ids: BlockIds, identities: Identities) -> None:
        self._identity[block_ids] = EMPTY
        if not self._copies or not (twins := self._has_twin.take(block_ids)).any():
            self._first[identities] = 0
            return
        self._first[identities[~twins]] = 0
        self._has_twin[block_ids] = False
        pairs = zip(block_ids[twins].tolist(), identities[twins].tolist(), strict=True)
        for block_id, identity in pairs:
            copies = self._copies.get(identity)
            if self._first[identity] == block_id + 1:
                self._first[identity] = copies.pop(0) + 1 if copies else 0
            else:
                assert copies, identity
                copies.remove(block_id)
            if copies is not None and not copies:
                del self._copies[identity]
