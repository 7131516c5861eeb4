"""Which free block goes next: an empty one, then the least recently used, as in vLLM. Pure."""

from collections import OrderedDict
from collections.abc import Iterable


class LeastRecentlyUsed:
    """Order of the free blocks: those no request holds, resident or empty.

    The block freed longest ago goes first, as in vLLM's free-block queue. A request's blocks are
    released tail first, so the tail of a chain goes before its head. Empty blocks stand at the
    front, those never used and those freed before they were full: an eviction happens only when no
    empty block is left.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def release(self, block_ids: Iterable[int]) -> None:
        """Resident blocks became free, the one to evict first coming first."""
        self._queue.update(dict.fromkeys(block_ids))

    def release_empty(self, block_id: int) -> None:
        """A block without content became free: the next to go, O(1)."""
        self._queue[block_id] = None
        self._queue.move_to_end(block_id, last=False)

    def revive(self, block_id: int) -> None:
        """A free resident block was hit and is in use again, O(1)."""
        del self._queue[block_id]

    def evict(self) -> int:
        """Take out the next free block, O(1). There must be one."""
        return self._queue.popitem(last=False)[0]
