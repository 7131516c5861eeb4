"""First in, first out. Pure."""

from collections.abc import Sequence

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.ranked import RankedBlocks


class FirstInFirstOut(EvictionOrder):
    """The block that became free first since its content came goes first; hits change nothing.

    It is not the storing that counts: a chain is stored head first, and a chain without its head is
    worth nothing. Freed tail first, its tail goes first, as with every policy here.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._free = RankedBlocks()
        self._place: list[int | None] = [None] * capacity_blocks
        self._next_place = 0

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """New content: the block has no place yet."""
        del contents, category
        for block_id in block_ids:
            self._place[block_id] = None

    def _enter(self, block_id: int) -> None:
        place = self._place[block_id]
        if place is None:
            place = self._place[block_id] = self._next_place
            self._next_place = place + 1
        self._free.add(block_id, place)

    def _leave(self, block_id: int) -> None:
        self._free.remove(block_id)

    def _evict(self) -> int:
        return self._free.pop()
