"""Greedy dual size frequency. Pure."""

from collections.abc import Sequence

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.ranked import RankedBlocks


class GreedyDualSizeFrequency(EvictionOrder):
    """The block with the lowest value goes first, of equals the LRU one.

    value = L + uses x cost / size, set at every use, where L is the value of the block evicted
    last: what is not used for long falls behind. All blocks are of one size, and cost 1: a later
    block of a chain costs more to compute, but nothing to lose once an earlier one is gone, so to
    keep it for its cost would evict heads before tails.

    Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy", HP Laboratories 1998.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._free = RankedBlocks()
        self._uses = [0] * capacity_blocks
        self._value = [0] * capacity_blocks
        self._evicted_value = 0

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """One use more, now."""
        del category
        for block_id in block_ids:
            uses = self._uses[block_id] = self._uses[block_id] + 1
            self._value[block_id] = self._evicted_value + uses

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """The first use."""
        del contents, category
        for block_id in block_ids:
            self._uses[block_id] = 1
            self._value[block_id] = self._evicted_value + 1

    def _enter(self, block_id: int) -> None:
        self._free.add(block_id, self._value[block_id])

    def _leave(self, block_id: int) -> None:
        self._free.remove(block_id)

    def _evict(self) -> int:
        block_id = self._free.pop()
        # A block held for long may be worth less than what went meanwhile; L never falls.
        self._evicted_value = max(self._evicted_value, self._value[block_id])
        return block_id
