"""Least recently used, as vLLM's free-block queue. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from workers.simulated.eviction.base import EvictionOrder


class LeastRecentlyUsed(EvictionOrder):
    """The block freed longest ago goes first.

    A request's blocks are released tail first, so the tail of a chain goes before its head. One
    queue holds empty and resident blocks, as in vLLM: after a reset the order stays as it is.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(0)
        self.capacity_blocks = capacity_blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def release(self, block_ids: Sequence[int]) -> None:
        """Resident blocks became free, the one to evict first coming first."""
        self._queue.update(dict.fromkeys(block_ids))

    def release_empty(self, block_id: int) -> None:
        """A block without content became free: the next to go, O(1)."""
        self._queue[block_id] = None
        self._queue.move_to_end(block_id, last=False)

    def revive(self, block_ids: Sequence[int]) -> None:
        """Free resident blocks were hit and are in use again, O(1) each."""
        for block_id in block_ids:
            del self._queue[block_id]

    def take(self, count: int) -> list[int]:
        """Take out the next free blocks, O(1) each. There must be so many."""
        popitem = self._queue.popitem
        return [popitem(last=False)[0] for _ in range(count)]

    def clear(self) -> None:
        """All content is forgotten."""

    def _enter(self, block_id: int) -> None:
        self._queue[block_id] = None

    def _leave(self, block_id: int) -> None:
        del self._queue[block_id]

    def _evict(self) -> int:
        return self._queue.popitem(last=False)[0]
