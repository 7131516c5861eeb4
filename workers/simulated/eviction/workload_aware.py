"""Workload-aware eviction: what its category is least likely to need soon goes first. Pure."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.reuse import ReuseFit

LIFE_S: Final = 5.0
"""How far ahead a block's reuse counts; that of the authors' patch to vLLM."""

FADE_S: Final = 300.0
"""After so long, what was seen counts half."""

TURNS_APART_MAX: Final = 16
"""Later turns are one category."""

CATEGORIES_MAX: Final = 256
"""Bounds the work of an eviction; requests of further ones count as of none."""

REMEMBERED_PER_BLOCK: Final = 4
"""Contents remembered after eviction, over the blocks: else only short gaps were ever seen."""

_ENTRIES_PER_BLOCK_MAX: Final = 4  # of the lists, over the capacity, before stale ones are dropped
_NONE: Final = -1  # the category of requests without one
_IN_USE: Final = -1


class WorkloadAware(EvictionOrder):
    """The block of the lowest priority goes first, of equals the LRU one.

    The priority of a block, of the category that used it last and free since t, is
    p (e^(-at) - e^(-a(t + life))), see `ReuseFit`: p and a are learnt online, also from contents
    that come back after their eviction. Categories that are unknown or were never reused have 0.

    A list per category, the LRU block first: within one, the priority falls with t. So an eviction
    compares heads only, O(categories).

    Source: Wang et al., "KVCache Cache in the Wild", arXiv 2506.02634, section 5.
    """

    def __init__(self, capacity_blocks: int, *, life_s: float = LIFE_S) -> None:
        super().__init__(capacity_blocks)
        self._life_s = life_s
        self._faded_s = 0.0
        self._fits: list[ReuseFit] = []
        self._number_of: dict[Category, int] = {}  # category -> its place in _fits
        self._lists: dict[int, deque[tuple[int, int]]] = {}  # category -> (stamp, block)s
        self._entries = 0
        self._next_stamp = 0
        self._heads: list[tuple[float, int, int]] | None = None  # heap: priority, stamp, category
        self._category = [_NONE] * capacity_blocks
        self._stamp = [_IN_USE] * capacity_blocks
        self._freed_s = [0.0] * capacity_blocks
        self._content = [0] * capacity_blocks
        self._remembered: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._remembered_max = REMEMBERED_PER_BLOCK * capacity_blocks

    def advance(self, now_s: float) -> None:
        """It is this late: priorities fall, and what was seen fades."""
        super().advance(now_s)
        self._heads = None
        while now_s - self._faded_s >= FADE_S:
            self._faded_s += FADE_S
            for fit in self._fits:
                fit.fade(0.5)

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """Reuses, of the categories that used the blocks last; now they are of this one."""
        self._heads = None
        number = self._number(category)
        for block_id in block_ids:
            is_free = self._stamp[block_id] != _IN_USE
            gap_s = self.now_s - self._freed_s[block_id] if is_free else 0.0
            self._reused(self._category[block_id], gap_s)
            self._category[block_id] = number
        self._seen(number, len(block_ids))

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """What is remembered is reused, too late for the cache."""
        self._heads = None
        number = self._number(category)
        for block_id, content in zip(block_ids, contents, strict=True):
            known = self._remembered.pop(content, None)
            if known is not None:
                before, freed_s = known
                self._reused(before, self.now_s - freed_s)
            self._content[block_id] = content
            self._category[block_id] = number
        self._seen(number, len(block_ids))

    def _enter(self, block_id: int) -> None:
        self._heads = None
        stamp = self._stamp[block_id] = self._next_stamp
        self._next_stamp = stamp + 1
        self._freed_s[block_id] = self.now_s
        category = self._category[block_id]
        self._lists.setdefault(category, deque()).append((stamp, block_id))
        self._entries += 1
        if self._entries > _ENTRIES_PER_BLOCK_MAX * self.capacity_blocks:
            self._compact()

    def _leave(self, block_id: int) -> None:
        self._heads = None
        self._stamp[block_id] = _IN_USE

    def _evict(self) -> int:
        if self._heads is None:
            found = (self._head(category) for category in self._lists)
            self._heads = [head for head in found if head is not None]
            heapq.heapify(self._heads)
        _, _, category = heapq.heappop(self._heads)
        _, block_id = self._lists[category].popleft()
        self._entries -= 1
        self._stamp[block_id] = _IN_USE
        following = self._head(category)
        if following is not None:
            heapq.heappush(self._heads, following)
        if category != _NONE:  # whose return would tell nothing, and take the place of others
            self._remember(block_id, category)
        return block_id

    def _remember(self, block_id: int, category: int) -> None:
        content = self._content[block_id]
        self._remembered[content] = category, self._freed_s[block_id]
        self._remembered.move_to_end(content)
        if len(self._remembered) > self._remembered_max:
            self._remembered.popitem(last=False)

    def _head(self, category: int) -> tuple[float, int, int] | None:
        """The first of a category's list, without those that have left it."""
        queue = self._lists[category]
        while queue:
            stamp, block_id = queue[0]
            if self._stamp[block_id] == stamp:
                return self._priority(category, block_id), stamp, category
            queue.popleft()
            self._entries -= 1
        return None

    def _priority(self, category: int, block_id: int) -> float:
        if category == _NONE:
            return 0.0
        return self._fits[category].priority(self.now_s - self._freed_s[block_id], self._life_s)

    def _number(self, category: Category | None) -> int:
        if category is None:
            return _NONE
        known = Category(category.kind, min(category.turn, TURNS_APART_MAX))
        number = self._number_of.get(known)
        if number is None:
            if len(self._fits) >= CATEGORIES_MAX:
                return _NONE
            number = self._number_of[known] = len(self._fits)
            self._fits.append(ReuseFit())
        return number

    def _seen(self, category: int, count: int) -> None:
        if category != _NONE:
            self._fits[category].seen += count

    def _reused(self, category: int, gap_s: float) -> None:
        if category != _NONE:
            self._fits[category].add_reuse(gap_s)

    def _compact(self) -> None:
        """Throw the old places of blocks that have left out."""
        for category, queue in self._lists.items():
            kept = (entry for entry in queue if self._stamp[entry[1]] == entry[0])
            self._lists[category] = deque(kept)
        self._entries = sum(len(queue) for queue in self._lists.values())
