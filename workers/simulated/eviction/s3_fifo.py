"""S3-FIFO: three static queues, two of blocks and one of what is remembered. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.ranked import RankedBlocks

SMALL_RATIO: Final = 0.1
"""Of the blocks: the small queue gives when more of it are free."""

HITS_MAX: Final = 3
"""Further hits do not count."""

PROMOTING_HITS: Final = 2
"""So many since it came move a block from the small queue to the main one."""


class S3Fifo(EvictionOrder):
    """A small queue for what is new, a main one for what was hit there, a memory of what was not.

    New content enters the small queue, content that is remembered the main one. When the small
    queue holds more than a tenth of the blocks (or the main one nothing), its first block goes: to
    the end of the main queue if it was hit twice, else out, and its content is remembered. Else the
    main queue's first goes: to its end with one hit less if it has one, else out. Memory is of as
    many contents as nine tenths of the blocks, the latest.

    Queues here have free blocks only: one in use can neither go nor move. Its place is that of its
    first release, so that of a chain the tail goes first.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._small, self._main = RankedBlocks(), RankedBlocks()
        self._small_max = SMALL_RATIO * capacity_blocks
        self._remembered: OrderedDict[int, None] = OrderedDict()
        self._remembered_max = capacity_blocks - int(self._small_max)
        self._is_main = [False] * capacity_blocks
        self._hits = [0] * capacity_blocks
        self._content = [0] * capacity_blocks
        self._place: list[int | None] = [None] * capacity_blocks
        self._next_place = 0

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """A hit more, up to HITS_MAX."""
        del category
        for block_id in block_ids:
            self._hits[block_id] = min(self._hits[block_id] + 1, HITS_MAX)

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """To the main queue what is remembered, which is forgotten now; else to the small one."""
        del category
        for block_id, content in zip(block_ids, contents, strict=True):
            self._hits[block_id] = 0
            self._content[block_id] = content
            self._place[block_id] = None
            self._is_main[block_id] = content in self._remembered
            self._remembered.pop(content, None)

    def _enter(self, block_id: int) -> None:
        place = self._place[block_id]
        if place is None:
            place = self._take_place(block_id)
        queue = self._main if self._is_main[block_id] else self._small
        queue.add(block_id, place)

    def _leave(self, block_id: int) -> None:
        queue = self._main if self._is_main[block_id] else self._small
        queue.remove(block_id)

    def _evict(self) -> int:
        small, main, hits = self._small, self._main, self._hits
        while True:
            if len(small) > self._small_max or (len(small) and not len(main)):
                block_id = small.pop()
                if hits[block_id] < PROMOTING_HITS:
                    self._remember(self._content[block_id])
                    return block_id
                hits[block_id] = 0
                self._is_main[block_id] = True
            else:
                block_id = main.pop()
                if not hits[block_id]:
                    return block_id
                hits[block_id] -= 1
            main.add(block_id, self._take_place(block_id))

    def _take_place(self, block_id: int) -> int:
        place = self._place[block_id] = self._next_place
        self._next_place = place + 1
        return place

    def _remember(self, content: int) -> None:
        self._remembered[content] = None
        self._remembered.move_to_end(content)
        if len(self._remembered) > self._remembered_max:
            self._remembered.popitem(last=False)
