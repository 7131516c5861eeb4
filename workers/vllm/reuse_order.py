"""Which free KV block goes next, by how likely its category's blocks are used again soon; pure.

Source: section 5 of "KVCache Cache in the Wild", arXiv 2506.02634, and its patch to vLLM (22236).
Only the standard library is imported: this runs inside vLLM's own environment.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

LIFE_S: Final = 5.0
"""How soon a reuse has to come to be worth keeping a block for; the patch's value."""

GAP_MIN_S: Final = 0.3
"""Shorter gaps are those of prompts shared by everybody: they say nothing of a category."""

WINDOW_BLOCKS: Final = 4096
"""Of a category; then all it has counted is halved, so that the recent past decides."""

COUNT_MIN: Final = 1e-9
"""Halved to less, reuses or gaps are none: far below, their ratios would not be numbers."""

CATEGORIES_MAX: Final = 64
"""Beyond, a category is as unknown as none: an eviction compares the heads of all."""

GHOSTS_PER_BLOCK: Final = 4
"""Evicted contents that are remembered, for each block there is: their reuse counts as well."""

_EMPTY: Final = 0
_UNKNOWN: Final = 1
_NOT_FREE: Final = -1


class CategoryFit:
    """How often, and after how long, blocks of one category were used again.

    The priority of a block last used t ago is p (e^(-a t) - e^(-a (t + life))). Its logarithm,
    level - rate t, is kept instead: old blocks' would all be lost to zero.

    Attributes:
        seen_blocks: uses by the category, the last WINDOW_BLOCKS to twice as many weighing most.
        reused_blocks: those of them that were followed by another use; p is their share.
        gaps_count: gaps of at least GAP_MIN_S before those.
        gaps_sum_s: their sum; a is count / sum, the highest possible without gaps.
        level: see above, as of the last `refresh`.
        rate_per_s: a, likewise.
        is_stale: something was noted since then.
    """

    __slots__ = (
        "gaps_count",
        "gaps_sum_s",
        "is_stale",
        "level",
        "rate_per_s",
        "reused_blocks",
        "seen_blocks",
    )

    def __init__(self) -> None:
        self.seen_blocks = self.reused_blocks = self.gaps_count = self.gaps_sum_s = 0.0
        self.level = -math.inf
        self.rate_per_s = 1 / GAP_MIN_S
        self.is_stale = False

    def note_use(self) -> None:
        """The category used a block."""
        self.is_stale = True
        self.seen_blocks += 1
        if self.seen_blocks >= 2 * WINDOW_BLOCKS:
            self.seen_blocks /= 2
            self.reused_blocks /= 2
            self.gaps_count /= 2
            self.gaps_sum_s /= 2
            if self.gaps_count < COUNT_MIN:
                self.gaps_count = self.gaps_sum_s = 0.0
            if self.reused_blocks < COUNT_MIN:
                self.reused_blocks = 0.0

    def note_reuse(self, gap_s: float) -> None:
        """What the category used last was used again, so long after it had become free."""
        self.is_stale = True
        self.reused_blocks += 1
        if gap_s >= GAP_MIN_S:
            self.gaps_count += 1
            self.gaps_sum_s += gap_s

    def refresh(self, life_s: float) -> None:
        """Fit again.

        Args:
            life_s: a reuse has to come within this.
        """
        self.is_stale = False
        has_gaps = self.gaps_count > 0
        self.rate_per_s = self.gaps_count / self.gaps_sum_s if has_gaps else 1 / GAP_MIN_S
        if not self.reused_blocks:
            self.level = -math.inf
            return
        share = min(1.0, self.reused_blocks / self.seen_blocks)
        self.level = math.log(share * -math.expm1(-self.rate_per_s * life_s))


class ReuseOrder:
    """Order of the free blocks: those that no request holds, with content or empty.

    Empty blocks go first; then, of the heads of one recency list for each category, the one of
    lowest priority: O(categories) an eviction. Categories that are unknown or were never reused
    have none, and go before the others, the block freed longest ago first. So without categories
    the order is vLLM's: least recently used. Blocks of a request are released tail first, so the
    tail of a chain goes before its head.

    A reuse is credited to the category that had used the block last, also when the block had been
    evicted meanwhile: else a category that is evicted early could never show that it comes back.
    """

    def __init__(self, blocks_count: int, *, life_s: float = LIFE_S, taken: Iterable[int] = ()):
        """All blocks are free and empty, except those taken.

        Args:
            blocks_count: ids are 0 to this, exclusive.
            life_s: see LIFE_S.
            taken: ids of blocks that are in use.
        """
        self.life_s = life_s
        self.free_count = 0
        self.fits: list[CategoryFit] = [CategoryFit(), CategoryFit()]
        self.reused_ghosts_count = 0
        self._numbers: dict[str, int] = {}
        self._lists: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
        self._list_of = [_NOT_FREE] * blocks_count
        self._category = [_UNKNOWN] * blocks_count
        self._content: list[Hashable] = [None] * blocks_count
        self._freed_s = [0.0] * blocks_count
        self._freed_number = [0] * blocks_count
        self._next_number = 1
        self._ghosts: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._ghosts_max = GHOSTS_PER_BLOCK * blocks_count
        in_use = set(taken)
        self.release_empty([block for block in range(blocks_count) if block not in in_use])

    @property
    def categories_count(self) -> int:
        """How many are known."""
        return len(self._numbers)

    @property
    def categories(self) -> dict[str, CategoryFit]:
        """Fits by name."""
        return {name: self.fits[number] for name, number in self._numbers.items()}

    # -- uses -------------------------------------------------------------------------------------

    def store(self, block: int, content: Hashable, category: str | None, now_s: float) -> None:
        """A block in use has got content: O(1).

        Args:
            block: its id.
            content: names it; equal names are equal contents.
            category: of the request that computed it; None: not known.
            now_s: any clock that does not go back.
        """
        ghost = self._ghosts.pop(content, None)
        if ghost is not None:
            self.reused_ghosts_count += 1
            self.fits[ghost[0]].note_reuse(now_s - ghost[1])
        self._content[block] = content
        self._use(block, category)

    def hit(self, block: int, category: str | None, now_s: float) -> None:
        """A request has found a block with content, free or in use: O(1)."""
        before = self._category[block]
        if before != _UNKNOWN:
            is_free = self._list_of[block] != _NOT_FREE
            self.fits[before].note_reuse(now_s - self._freed_s[block] if is_free else 0.0)
        self._use(block, category)

    def _use(self, block: int, category: str | None) -> None:
        number = self._number(category)
        if number == _UNKNOWN:  # whose block is hit without a category keeps its own
            number = self._category[block]
        self._category[block] = number
        if number != _UNKNOWN:
            self.fits[number].note_use()

    def _number(self, category: str | None) -> int:
        if category is None:
            return _UNKNOWN
        number = self._numbers.get(category)
        if number is None:
            if len(self._numbers) >= CATEGORIES_MAX:
                return _UNKNOWN
            number = self._numbers[category] = len(self._lists)
            self._lists.append(OrderedDict())
            self.fits.append(CategoryFit())
        return number

    # -- free and taken ---------------------------------------------------------------------------

    def release(self, blocks: Iterable[int], now_s: float) -> None:
        """Blocks with content became free, the one to evict first coming first: O(1) each."""
        for block in blocks:
            number = self._category[block]
            self._list_of[block] = number
            self._lists[number][block] = None
            self._freed_s[block] = now_s
            self._freed_number[block] = self._next_number
            self._next_number += 1
            self.free_count += 1

    def release_empty(self, blocks: Iterable[int]) -> None:
        """Blocks without content became free: the next to go, the first of them first."""
        empty = self._lists[_EMPTY]
        ordered = list(blocks)
        for block in reversed(ordered):
            empty[block] = None
            empty.move_to_end(block, last=False)
            self._list_of[block] = _EMPTY
            self._category[block] = _UNKNOWN
            self._content[block] = None
        self.free_count += len(ordered)

    def take(self, block: int) -> None:
        """A free block is in use again, with its content: O(1).

        Raises:
            KeyError: it is not free.
        """
        number = self._list_of[block]
        if number == _NOT_FREE:
            raise KeyError(block)
        del self._lists[number][block]
        self._list_of[block] = _NOT_FREE
        self.free_count -= 1

    def forget(self) -> None:
        """No block has content any more, whether free or not; what was learned stays."""
        free = [block for block, number in enumerate(self._list_of) if number != _NOT_FREE]
        for blocks in self._lists:
            blocks.clear()
        self._ghosts.clear()
        self._content = [None] * len(self._content)
        self._category = [_UNKNOWN] * len(self._category)
        self.free_count = 0
        self.release_empty(free)

    def evict(self, count: int, now_s: float) -> list[int]:
        """Take the next free blocks: O(categories), and their logarithm for each further one.

        Raises:
            IndexError: there are not so many.
        """
        if count > self.free_count:
            raise IndexError(f"{count} of {self.free_count} free blocks")
        self.free_count -= count
        evicted: list[int] = []
        empty = self._lists[_EMPTY]
        while empty and len(evicted) < count:
            block, _ = empty.popitem(last=False)
            self._list_of[block] = _NOT_FREE
            evicted.append(block)
        if len(evicted) == count:
            return evicted
        heads = self._heads(now_s)
        heapify(heads)
        while True:
            number = heads[0][2]
            blocks = self._lists[number]
            block, _ = blocks.popitem(last=False)
            evicted.append(block)
            self._empty(block, number)
            if len(evicted) == count:
                return evicted
            if blocks:
                heapreplace(heads, self._rank(number, next(iter(blocks)), now_s))
            else:
                heappop(heads)

    def in_order(self, now_s: float) -> Iterator[int]:
        """Free blocks as they would be evicted at this moment; they stay."""
        yield from list(self._lists[_EMPTY])
        rests = {
            number: iter(list(blocks))
            for number, blocks in enumerate(self._lists)
            if blocks and number != _EMPTY
        }
        heads: list[tuple[float, int, int, int]] = []
        for number, rest in rests.items():
            block = next(rest)
            heads.append((*self._rank(number, block, now_s), block))
        heapify(heads)
        while heads:
            _, _, number, block = heappop(heads)
            yield block
            following = next(rests[number], None)
            if following is not None:
                heappush(heads, (*self._rank(number, following, now_s), following))

    def _heads(self, now_s: float) -> list[tuple[float, int, int]]:
        """Ranks of the first of every list: `_rank` written out, for most of the time goes here."""
        fits, freed_s, freed_number = self.fits, self._freed_s, self._freed_number
        heads = []
        for number, blocks in enumerate(self._lists):
            if blocks:
                fit, block = fits[number], next(iter(blocks))
                if fit.is_stale:
                    fit.refresh(self.life_s)
                priority = fit.level - fit.rate_per_s * (now_s - freed_s[block])
                heads.append((priority, freed_number[block], number))
        return heads

    def _rank(self, number: int, block: int, now_s: float) -> tuple[float, int, int]:
        fit = self.fits[number]
        if fit.is_stale:
            fit.refresh(self.life_s)
        priority = fit.level - fit.rate_per_s * (now_s - self._freed_s[block])
        return priority, self._freed_number[block], number

    def _empty(self, block: int, number: int) -> None:
        """An evicted block loses its content, which is remembered for a while."""
        content = self._content[block]
        if number != _UNKNOWN and content is not None:
            self._ghosts[content] = (number, self._freed_s[block])
            self._ghosts.move_to_end(content)
            if len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)
        self._content[block] = None
        self._category[block] = _UNKNOWN
        self._list_of[block] = _NOT_FREE
