"""The order of free blocks inside vLLM against a naive one, and against vLLM's own."""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.simulated.eviction.base import Category
from workers.simulated.eviction.workload_aware import WorkloadAware
from workers.vllm.reuse_order import (
    CATEGORIES_MAX,
    GAP_MIN_S,
    LIFE_S,
    WINDOW_BLOCKS,
    CategoryFit,
    ReuseOrder,
)

BLOCKS = 12
CATEGORIES = ("chat:0", "chat:1", "once:0", None)


@dataclass
class Seen:
    """All that ever happened to the blocks a category was the last to use."""

    uses: int = 0
    reuses: int = 0
    gaps_s: list[float] = field(default_factory=list)

    def reused(self, gap_s: float) -> None:
        """One of them was used again."""
        self.reuses += 1
        if gap_s >= GAP_MIN_S:
            self.gaps_s.append(gap_s)

    def priority(self, age_s: float) -> float:
        """The formula as it is printed, of the whole history."""
        if not self.reuses:
            return 0.0
        rate = len(self.gaps_s) / sum(self.gaps_s) if self.gaps_s else 1 / GAP_MIN_S
        soon = math.exp(-rate * age_s) - math.exp(-rate * (age_s + LIFE_S))
        return self.reuses / self.uses * soon


class Orders(RuleBasedStateMachine):
    """Blocks are taken, filled, hit and freed; which goes next is looked up in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ReuseOrder(BLOCKS, taken=[0])
        self.now_s = 0.0
        self.empty = list(range(1, BLOCKS))
        self.freed: list[int] = []  # in order
        self.freed_s = [0.0] * BLOCKS
        self.used: list[int] = []
        self.category: list[str | None] = [None] * BLOCKS
        self.content: list[int | None] = [None] * BLOCKS
        self.gone: dict[int, tuple[str, float]] = {}
        self.seen = {name: Seen() for name in CATEGORIES if name is not None}
        self.evictions: Counter[str | None] = Counter()

    @rule(seconds=st.sampled_from([0.125, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    def use(self, block: int, category: str | None) -> None:
        category = category or self.category[block]
        self.category[block] = category
        if category is not None:
            self.seen[category].uses += 1

    @rule(count=st.integers(1, 4), content=st.integers(0, 6), category=st.sampled_from(CATEGORIES))
    def take_and_fill(self, count: int, content: int, category: str | None) -> None:
        """The next blocks; the last of them gets content, the others stay empty for now."""
        count = min(count, len(self.empty) + len(self.freed))
        if not count:
            return
        expected = []
        for _ in range(count):
            if self.empty:
                expected.append(self.empty.pop(0))
                continue
            chosen = min(
                self.freed,
                key=lambda block: (self.worth(block), self.freed.index(block)),
            )
            self.freed.remove(chosen)
            category_of, content_of = self.category[chosen], self.content[chosen]
            if category_of is not None and content_of is not None:
                self.gone[content_of] = (category_of, self.freed_s[chosen])
            self.category[chosen] = self.content[chosen] = None
            expected.append(chosen)
        assert self.order.evict(count, self.now_s) == expected
        self.used += expected
        block = expected[-1]
        self.content[block] = content
        if content in self.gone:
            before, then_s = self.gone.pop(content)
            self.seen[before].reused(self.now_s - then_s)
        self.use(block, category)
        self.order.store(block, content, category, self.now_s)

    def worth(self, block: int) -> float:
        category = self.category[block]
        if category is None:
            return 0.0
        return self.seen[category].priority(self.now_s - self.freed_s[block])

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        """Those with content behind, those without in front, as vLLM's pool does."""
        blocks = data.draw(st.lists(st.sampled_from(self.used), unique=True, min_size=1))
        full = [block for block in blocks if self.content[block] is not None]
        bare = [block for block in blocks if self.content[block] is None]
        self.used = [block for block in self.used if block not in blocks]
        self.order.release_empty(bare)
        self.order.release(full, self.now_s)
        self.empty[:0] = bare
        self.freed += full
        for block in full:
            self.freed_s[block] = self.now_s

    @precondition(lambda self: any(self.content[one] is not None for one in range(BLOCKS)))
    @rule(data=st.data(), category=st.sampled_from(CATEGORIES))
    def hit(self, data: st.DataObject, category: str | None) -> None:
        """A block with content, free or in use."""
        full = [block for block in range(BLOCKS) if self.content[block] is not None]
        block = data.draw(st.sampled_from(full))
        before = self.category[block]
        is_free = block in self.freed
        if before is not None:
            self.seen[before].reused(self.now_s - self.freed_s[block] if is_free else 0.0)
        self.use(block, category)
        self.order.hit(block, category, self.now_s)
        if is_free:
            self.freed.remove(block)
            self.used.append(block)
            self.order.take(block)

    @rule()
    def forget(self) -> None:
        self.order.forget()
        free = sorted([*self.empty, *self.freed])
        self.empty, self.freed = free, []
        self.category, self.content = [None] * BLOCKS, [None] * BLOCKS
        self.gone = {}

    @invariant()
    def shows_what_it_would_do(self) -> None:
        """Looking changes nothing and tells every free block once, empty ones first."""
        shown = list(self.order.in_order(self.now_s))
        assert self.order.free_count == len(shown) == len(self.empty) + len(self.freed)
        assert shown[: len(self.empty)] == self.empty
        assert sorted(shown[len(self.empty) :]) == sorted(self.freed)


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_order_shown_is_the_order_of_eviction() -> None:
    """With several categories of different fits, what is shown is what goes, one by one."""
    order = ReuseOrder(9)
    names = ("a", "b", "c")
    for turn in range(3):
        blocks = order.evict(9, turn * 10.0)
        for place, block in enumerate(blocks):
            content = place % (3 + turn)  # the fewer, the more are reused
            order.store(block, (names[place % 3], content), names[place % 3], turn * 10.0)
        for block in blocks:
            order.release([block], turn * 10.0 + block * 0.1)
    shown = list(order.in_order(31.0))
    assert order.reused_ghosts_count > 0
    assert [order.evict(1, 31.0)[0] for _ in range(9)] == shown
    assert shown != sorted(shown)


def test_without_categories_least_recently_used() -> None:
    """No request tells a category: the block freed longest ago goes next, however often it is hit.

    That is vLLM's own order.
    """
    order = ReuseOrder(4)
    for block in order.evict(4, 0.0):
        order.store(block, block, None, 0.0)
    order.release([3, 0], 1.0)
    order.release([2, 1], 2.0)
    for _ in range(3):
        order.hit(0, None, 3.0)
        order.take(0)
        order.release([0], 3.0)
    assert order.evict(4, 4.0) == [3, 2, 1, 0]


def test_evicted_content_that_comes_back_counts() -> None:
    """What was evicted before its reuse shows with it that its category comes back, and stays."""
    order = ReuseOrder(2)

    def fill(content: object, category: str, now_s: float) -> int:
        (block,) = order.evict(1, now_s)
        order.store(block, content, category, now_s)
        order.release([block], now_s)
        return block

    for now_s in (0.0, 20.0):
        slow = fill("same", "slow", now_s)
        others = [fill(("once", now_s, number), "once", now_s + 1) for number in range(3)]
        assert (slow in others) == (now_s == 0.0)
    assert order.categories["slow"].rate_per_s == pytest.approx(1 / 20)
    assert order.categories["once"].reused_blocks == 0


def test_recent_past_decides() -> None:
    """What a category did long ago fades: its window is bounded."""
    order = ReuseOrder(1)
    fit = None
    for number in range(6 * WINDOW_BLOCKS):
        (block,) = order.evict(1, number * 1.0)
        reused = number < WINDOW_BLOCKS
        order.store(block, "same" if reused else number, "chat:0", number * 1.0)
        order.release([block], number * 1.0)
        fit = order.categories["chat:0"]
        assert fit.seen_blocks < 2 * WINDOW_BLOCKS
    assert fit is not None
    assert fit.reused_blocks / fit.seen_blocks < 0.1


def test_a_reuse_of_long_ago_is_none() -> None:
    """Not a number too small to be divided by: that would end the engine."""
    fit = CategoryFit()
    fit.note_use()
    fit.note_reuse(20.0)
    fit.refresh(LIFE_S)
    assert (fit.level, fit.rate_per_s) != (-math.inf, 1 / GAP_MIN_S)
    for halvings in range(1200):
        fit.seen_blocks = 2.0 * WINDOW_BLOCKS - 1
        fit.note_use()
        fit.refresh(LIFE_S)
        assert (fit.level == -math.inf) == (halvings >= 29)  # 2 ** -30 is below COUNT_MIN
    assert fit.rate_per_s == 1 / GAP_MIN_S
    fit.note_reuse(0.0)
    fit.refresh(LIFE_S)
    assert fit.level > -math.inf


def test_categories_are_bounded() -> None:
    """Whatever clients invent, an eviction compares a bounded number of heads."""
    order = ReuseOrder(4)
    for number in range(3 * CATEGORIES_MAX):
        (block,) = order.evict(1, 0.0)
        order.store(block, number, f"kind-{number}", 0.0)
        order.release([block], 0.0)
    assert len(order.categories) == CATEGORIES_MAX


def test_more_than_there_are_is_refused() -> None:
    """Nothing is taken then, and what is not free cannot be taken by name."""
    order = ReuseOrder(2)
    with pytest.raises(IndexError):
        order.evict(3, 0.0)
    assert order.evict(2, 0.0) == [0, 1]
    with pytest.raises(KeyError):
        order.take(0)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["fill", "free", "hit"]),
            st.integers(0, 10),
            st.integers(0, 2),
            st.sampled_from([0.0, 0.25, 1.0, 3.0]),
        ),
        min_size=20,
        max_size=60,
    )
)
def test_simulated_engine_evicts_alike(steps: list[tuple[str, int, int, float]]) -> None:
    """The order inside vLLM and the simulated engine's are written apart, and are the same.

    As long as nothing fades: one forgets by uses, the other by time.
    """
    ours, theirs = ReuseOrder(8), WorkloadAware(8)
    now_s = 0.0
    used: list[int] = []
    free: list[int] = []
    for what, number, turn, seconds in steps:
        now_s += seconds
        theirs.advance(now_s)
        category = Category("chat", turn)
        if what == "fill" and len(theirs):
            (block,) = ours.evict(1, now_s)
            assert theirs.take(1) == [block]
            ours.store(block, number, f"chat:{turn}", now_s)
            theirs.store([block], [number], category)
            used.append(block)
            free = [one for one in free if one != block]
        elif what == "free" and used:
            block = used.pop(number % len(used))
            ours.release([block], now_s)
            theirs.release([block])
            free.append(block)
        elif what == "hit" and free:
            block = free.pop(number % len(free))
            ours.hit(block, f"chat:{turn}", now_s)
            ours.take(block)
            theirs.touch([block], category)
            theirs.revive([block])
            used.append(block)
    count = ours.free_count
    assert len(theirs) == count
    assert theirs.take(count) == ours.evict(count, now_s)
