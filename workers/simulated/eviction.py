"""Which free block goes next. Pure; the block pool owns one policy and tells it every change."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of the free blocks: those no request holds, resident or empty."""

    def __len__(self) -> int:
        """Free blocks."""

    def release(self, block_ids: Iterable[int]) -> None:
        """Blocks became free, the one to evict first coming first."""

    def revive(self, block_id: int) -> None:
        """A free resident block was hit and is in use again."""

    def evict(self) -> int:
        """Take out the next free block. There must be one."""


class LeastRecentlyUsed:
    """The block freed longest ago goes first, as in vLLM's free-block queue.

    A request's blocks are released tail first, so the tail of a chain goes before its head.
    Never used blocks stand at the front: an eviction happens only when no empty block is left.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def release(self, block_ids: Iterable[int]) -> None:
        """Append in the given order."""
        self._queue.update(dict.fromkeys(block_ids))

    def revive(self, block_id: int) -> None:
        """Take one block out of the middle of the queue, O(1)."""
        del self._queue[block_id]

    def evict(self) -> int:
        """Take the front of the queue, O(1)."""
        return self._queue.popitem(last=False)[0]


EVICTION_POLICIES = {"lru": LeastRecentlyUsed}
"""Name -> factory taking the pool's capacity in blocks."""
