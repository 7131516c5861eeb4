"""Which free blocks go next, many at a time. Pure.

What the fast engine needs of an eviction policy is `FreeOrder`. `LeastRecentlyFreed` equals
`workers.simulated.eviction.lru.LeastRecentlyUsed` block by block; every other policy is the very
same object for both engines, which `InTurns` makes speak in arrays.
"""

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.belady import Future
from workers.simulated.eviction.policies import LRU, eviction_order

BlockIds = npt.NDArray[np.intp]

_CHUNK_BLOCKS = 64  # looked at together at least: a numpy call costs as much as this many blocks
_ENTRIES_PER_BLOCK_MAX = 4  # of the queue, over the capacity, before stale ones are thrown out


class FreeOrder(Protocol):
    """`workers.simulated.eviction.base.EvictionOrder`, of arrays.

    Attributes:
        in_turns: what was stored decides what is taken later, so blocks of several steps must not
            be taken together.
    """

    in_turns: bool

    def __len__(self) -> int:
        """Free blocks."""
        ...

    def advance(self, now_s: float) -> None:
        """It is this late."""
        ...

    def begin(self, request_id: str) -> None:
        """A request enters the batch."""
        ...

    def touch(self, block_ids: BlockIds, category: Category | None) -> None:
        """A request has hit these resident blocks, free or in use."""
        ...

    def store(
        self, block_ids: BlockIds, identities: npt.NDArray[np.int64], category: Category | None
    ) -> None:
        """Blocks in use hold this content from now on; not told unless `in_turns`."""
        ...

    def release(self, block_ids: BlockIds) -> None:
        """Distinct resident blocks became free; of a chain, the tail comes first."""
        ...

    def release_empty(self, block_id: int) -> None:
        """A block without content became free: it goes before all others."""
        ...

    def revive(self, block_ids: BlockIds) -> None:
        """Free resident blocks were hit and are in use again."""
        ...

    def take(self, count: int) -> BlockIds:
        """Take out the next `count` free blocks, the first to go first; there must be so many."""
        ...


def free_order(name: str, capacity_blocks: int, future: Future | None = None) -> FreeOrder:
    """As `workers.simulated.eviction.policies.eviction_order`."""
    if name == LRU:
        return LeastRecentlyFreed(capacity_blocks)
    return InTurns(eviction_order(name, capacity_blocks, future))


class InTurns:
    """A policy that takes blocks one by one, in arrays.

    Attributes:
        in_turns: it is.
    """

    in_turns = True

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def advance(self, now_s: float) -> None:
        """It is this late."""
        self._order.advance(now_s)

    def begin(self, request_id: str) -> None:
        """A request enters the batch."""
        self._order.begin(request_id)

    def touch(self, block_ids: BlockIds, category: Category | None) -> None:
        """A request has hit these resident blocks."""
        self._order.touch(block_ids.tolist(), category)

    def store(
        self, block_ids: BlockIds, identities: npt.NDArray[np.int64], category: Category | None
    ) -> None:
        """Blocks in use hold this content from now on."""
        self._order.store(block_ids.tolist(), identities.tolist(), category)

    def release(self, block_ids: BlockIds) -> None:
        """Distinct resident blocks became free."""
        self._order.release(block_ids.tolist())

    def release_empty(self, block_id: int) -> None:
        """A block without content became free."""
        self._order.release_empty(block_id)

    def revive(self, block_ids: BlockIds) -> None:
        """Free resident blocks are in use again."""
        self._order.revive(block_ids.tolist())

    def take(self, count: int) -> BlockIds:
        """The next free blocks."""
        return np.array(self._order.take(count), np.intp)


class LeastRecentlyFreed:
    """Empty blocks, then the block freed longest ago, as in vLLM's free-block queue.

    A queue of segments, each the blocks of one release under its stamp. A revived block stays in
    its segment and only loses its stamp, so that whoever comes to it passes over it; all places of
    a block before its latest are of that kind. So a release, a revival and a removal of many blocks
    are a few array operations each.

    Attributes:
        in_turns: it is not: a release decides, whatever is stored meanwhile.
    """

    in_turns = False

    def __init__(self, capacity_blocks: int) -> None:
        self._stamps = np.zeros(capacity_blocks, np.int32)  # of the last release; -1: revived
        self._segments = deque([(0, np.arange(capacity_blocks))])
        self._position = 0  # in the first segment
        self._empty: list[int] = []  # freed without content, the next to go last
        self._entries = self._count = capacity_blocks
        self._entries_max = _ENTRIES_PER_BLOCK_MAX * capacity_blocks
        self._next_stamp = 1

    def __len__(self) -> int:
        return self._count

    def advance(self, now_s: float) -> None:
        """Time does not matter."""

    def begin(self, request_id: str) -> None:
        """Nor who comes."""

    def touch(self, block_ids: BlockIds, category: Category | None) -> None:
        """Nor who hits what."""

    def store(
        self, block_ids: BlockIds, identities: npt.NDArray[np.int64], category: Category | None
    ) -> None:
        """Nor what is stored."""

    def release(self, block_ids: BlockIds) -> None:
        """Resident blocks became free, the one to evict first coming first. The array is kept."""
        if not len(block_ids):
            return
        stamp = self._next_stamp
        self._next_stamp = stamp + 1
        self._stamps[block_ids] = stamp
        self._segments.append((stamp, block_ids))
        self._entries += len(block_ids)
        self._count += len(block_ids)
        if self._entries > self._entries_max:
            self._compact()

    def release_empty(self, block_id: int) -> None:
        """A block without content became free: the next to go."""
        self._empty.append(block_id)
        self._count += 1

    def revive(self, block_ids: BlockIds) -> None:
        """Free resident blocks are in use again."""
        self._stamps[block_ids] = -1
        self._count -= len(block_ids)

    def take(self, count: int) -> BlockIds:
        """Those without content, then those freed longest ago, in order."""
        assert 0 < count <= self._count, (count, self._count)
        self._count -= count
        parts = []
        if self._empty:
            parts.append(np.array(self._empty[-count:][::-1]))
            del self._empty[-count:]
            count -= len(parts[0])
        while count:
            stamp, block_ids = self._segments[0]
            position = self._position
            end = min(position + max(count, _CHUNK_BLOCKS), len(block_ids))
            part = block_ids[position:end]
            fresh = self._stamps.take(part) == stamp
            if not fresh.all():
                places = fresh.nonzero()[0]
                if len(places) > count:
                    end = position + int(places[count - 1]) + 1
                    places = places[:count]
                part = part[places]
            elif len(part) > count:
                part = part[:count]
                end = position + count
            if len(part):
                parts.append(part)
                count -= len(part)
            self._entries -= end - position
            self._position = end
            if end == len(block_ids):
                self._segments.popleft()
                self._position = 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _compact(self) -> None:
        """Throw the revived blocks' old places out."""
        kept: deque[tuple[int, BlockIds]] = deque()
        for stamp, block_ids in self._segments:
            ids = block_ids[self._position :]
            self._position = 0
            ids = ids[self._stamps.take(ids) == stamp]
            if len(ids):
                kept.append((stamp, ids))
        self._segments = kept
        self._entries = sum(len(ids) for _, ids in kept)
        assert self._entries + len(self._empty) == self._count, (self._entries, self._count)
