"""Laws of dividing the index's memory among instances."""

import math

from hypothesis import given
from hypothesis import strategies as st

from indexer.contract.identifiers import SlotIndex
from indexer.publishing.budget import (
    FULL_AGAIN_S,
    IDLE_CLASS_S,
    RELAX_S,
    Allowance,
    Claim,
    blocks_within,
    divide,
    idle_class,
    least,
    server_limit_bytes,
)

BLOCKS_MAX = 1 << 22

idle_times = st.one_of(st.floats(0, 1e9), st.just(math.inf))
claims_lists = st.lists(
    st.builds(lambda blocks, idle_s: (blocks, idle_s), st.integers(0, BLOCKS_MAX), idle_times),
    max_size=40,
).map(
    lambda rows: [
        Claim(slot=SlotIndex(i), blocks=blocks, idle_s=idle_s)
        for i, (blocks, idle_s) in enumerate(rows)
    ]
)
limits = st.integers(-100, 40 * BLOCKS_MAX)


@given(claims=claims_lists, blocks_max=limits)
def test_budgets_never_exceed_the_limit(claims: list[Claim], blocks_max: int) -> None:
    """Every instance has a budget, none below zero, all together at most the limit."""
    budgets = divide(claims, blocks_max)
    assert {claim.slot for claim in claims} == set(budgets)
    assert all(blocks >= 0 for blocks in budgets.values())
    assert sum(budgets.values()) <= max(blocks_max, 0)


@given(claims=claims_lists, blocks_max=limits)
def test_the_warmest_give_way_last(claims: list[Claim], blocks_max: int) -> None:
    """Who has to give way has none colder beside it that keeps anything."""
    budgets = divide(claims, blocks_max)
    for claim in claims:
        if budgets[claim.slot] < claim.blocks:
            colder = [c for c in claims if idle_class(c.idle_s) > idle_class(claim.idle_s)]
            assert [0] * len(colder) == [budgets[c.slot] for c in colder]


@given(claims=claims_lists)
def test_nobody_gives_way_without_need(claims: list[Claim]) -> None:
    """Where there is room for what all hold, and some to grow, all keep it."""
    blocks = sum(claim.blocks for claim in claims)
    budgets = divide(claims, 2 * blocks + len(claims))
    assert all(budgets[claim.slot] >= claim.blocks for claim in claims)


@given(claims=claims_lists, blocks_max=st.integers(0, 40 * BLOCKS_MAX), share=st.floats(0, 0.01))
def test_little_changes_change_little(claims: list[Claim], blocks_max: int, share: float) -> None:
    """Budgets do not jump when an instance grows by a hundredth: nothing is withheld in vain."""
    grown = [
        Claim(slot=c.slot, blocks=c.blocks + int(c.blocks * share), idle_s=c.idle_s) for c in claims
    ]
    before, after = divide(claims, blocks_max), divide(grown, blocks_max)
    moved = max((abs(before[slot] - after[slot]) for slot in before), default=0)
    assert moved <= 0.04 * sum(c.blocks for c in claims) + len(claims) + 1


def test_of_equally_warm_instances_all_give_the_same_share() -> None:
    """Whoever was reserved within the last half minute counts as in use."""
    claims = [
        Claim(slot=SlotIndex(i), blocks=blocks, idle_s=idle_s)
        for i, (blocks, idle_s) in enumerate([(8000, 0.0), (4000, IDLE_CLASS_S), (9000, math.inf)])
    ]
    budgets = divide(claims, 6000)
    assert budgets[SlotIndex(2)] == 0
    assert 1.9 < budgets[SlotIndex(0)] / budgets[SlotIndex(1)] < 2.0
    assert 5998 <= sum(budgets.values()) <= 6000


def test_several_limits_hold_at_once() -> None:
    """A budget is the least of what the fleet's limit and the server's allow."""
    zero, one = SlotIndex(0), SlotIndex(1)
    assert {zero: 3, one: 2} == least({zero: 5, one: 2}, {zero: 3})


def test_blocks_fit_into_nine_tenths_of_a_limit() -> None:
    """An index that cannot be measured yet is taken to be expensive; no room is no blocks."""
    assert blocks_within(1_000_000, 20.0) == 45_000
    assert blocks_within(1_000_000, None) == 7031
    assert blocks_within(-5.0, 20.0) == 0


def test_the_index_may_take_what_the_rest_of_a_server_leaves() -> None:
    """95 % of maxmemory, less all that is not the index."""
    limit_bytes = server_limit_bytes(index_bytes=300, used_bytes=700, maxmemory_bytes=1000)
    assert math.isclose(550, limit_bytes)


def test_a_full_server_bounds_an_instance_until_it_has_room_again() -> None:
    """The ceiling stands where the server was full, and rises slowly after a while."""
    allowance = Allowance()
    assert allowance.blocks_max is None
    assert allowance.found_full(1600, now_s=0.0)
    assert allowance.blocks_max == 1599
    allowance.budget_blocks = 1000
    assert allowance.blocks_max == 1000
    allowance.budget_blocks = None
    allowance.relax(1700, now_s=RELAX_S - 1)
    assert allowance.blocks_max == 1599
    allowance.relax(1750, now_s=RELAX_S)
    assert allowance.blocks_max == 1599 + 1599 // 16 + 16
    allowance.relax(1750, now_s=RELAX_S + 1)
    assert allowance.blocks_max is not None
    allowance.relax(1750, now_s=2 * RELAX_S)
    assert allowance.blocks_max is None


def test_blocks_give_way_at_growing_intervals_while_a_server_stays_full() -> None:
    """What others have freed gets time to show; after a while without refusals it begins anew."""
    allowance = Allowance()
    asked_s = [0.0, 0.05, 0.11, 0.2, 0.32, 0.6, 0.73]
    gave_way = [allowance.found_full(100, now_s=s) for s in asked_s]
    assert gave_way == [True, False, True, False, True, False, True]
    assert not allowance.found_full(100, now_s=0.74)
    assert allowance.found_full(100, now_s=0.75 + FULL_AGAIN_S)
    assert allowance.found_full(100, now_s=0.86 + FULL_AGAIN_S)
