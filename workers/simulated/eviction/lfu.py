"""Least frequently used. Pure."""

from collections.abc import Sequence

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.ranked import RankedBlocks


class LeastFrequentlyUsed(EvictionOrder):
    """The block with the fewest uses since its content came goes first, of equals the LRU one.

    A use is the storing, or a hit; nothing ages, so what was popular once stays.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._free = RankedBlocks()
        self._uses = [0] * capacity_blocks

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """One use more."""
        del category
        for block_id in block_ids:
            self._uses[block_id] += 1

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """The first use."""
        del contents, category
        for block_id in block_ids:
            self._uses[block_id] = 1

    def _enter(self, block_id: int) -> None:
        self._free.add(block_id, self._uses[block_id])

    def _leave(self, block_id: int) -> None:
        self._free.remove(block_id)

    def _evict(self) -> int:
        return self._free.pop()
