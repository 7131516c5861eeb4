"""Every eviction policy evicts what its law, said naively, evicts."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.naive_evictions import (
    Naive,
    NaiveBelady,
    NaiveFifo,
    NaiveGdfs,
    NaiveLfu,
    NaiveS3Fifo,
    NaiveWorkloadAware,
)
from workers.simulated.eviction.base import Category
from workers.simulated.eviction.belady import Future
from workers.simulated.eviction.policies import EVICTIONS, eviction_order
from workers.simulated.eviction.workload_aware import REMEMBERED_PER_BLOCK, WorkloadAware

CAPACITY = 12
CONTENTS = [30, 80]  # the latter more than any policy remembers
REQUESTS = 15

CATEGORIES = [None, Category("chat", 0), Category("chat", 1), Category("api", 0)]

TWINS: dict[str, Callable[[int], Naive]] = {
    "lru": Naive,
    "fifo": NaiveFifo,
    "lfu": NaiveLfu,
    "gdfs": NaiveGdfs,
    "s3_fifo": NaiveS3Fifo,
    "workload_aware": NaiveWorkloadAware,
}

ACTIONS = ["take", "store", "store", "release", "release", "empty", "hit", "hit"]
PAUSES_S = [0.0, 0.1, 1.0, 7.0, 250.0]
LONG_PAUSES_S = [*PAUSES_S, 10_000.0, 322_000.0]  # after the last, counts are no floats any more


@pytest.mark.parametrize("name", EVICTIONS)
@given(
    actions_count=st.integers(0, 150),
    seed=st.integers(0, 1 << 32),
    pauses_s=st.sampled_from([PAUSES_S, LONG_PAUSES_S]),
)
def test_a_policy_and_its_naive_twin_evict_alike(
    name: str, actions_count: int, seed: int, pauses_s: list[float]
) -> None:
    """Whatever is taken, stored, hit and freed, by whom and when."""
    rng = np.random.default_rng(seed)
    contents_count = int(rng.choice(CONTENTS))
    requests = [
        (str(number), rng.permutation(contents_count)[:4].tolist()) for number in range(REQUESTS)
    ]
    order = eviction_order(name, CAPACITY, Future(requests))
    twin = NaiveBelady(CAPACITY, requests) if name == "belady" else TWINS[name](CAPACITY)
    bare: set[int] = set()  # in use, without content
    used: set[int] = set()  # in use, with content
    free: set[int] = set()  # with content
    now_s = 0.0

    def drawn(blocks: set[int], count: int) -> list[int]:
        return [int(one) for one in rng.permutation(sorted(blocks))[:count]]

    for place in range(actions_count + 1):
        action = ACTIONS[rng.integers(len(ACTIONS))] if place < actions_count else "take"
        wanted = int(rng.integers(1, CAPACITY)) if place < actions_count else CAPACITY
        category = CATEGORIES[rng.integers(len(CATEGORIES))]
        now_s += pauses_s[rng.integers(len(pauses_s))]
        for one in (order, twin):
            one.advance(now_s)
        match action:
            case "take":
                count = min(wanted, len(order))
                expected = twin.take(count)
                assert expected == order.take(count)
                bare |= set(expected)
                free -= bare
            case "store":
                blocks = drawn(bare, wanted)
                contents = rng.integers(contents_count, size=len(blocks)).tolist()
                for one in (order, twin):
                    one.store(blocks, contents, category)
                bare, used = bare - set(blocks), used | set(blocks)
            case "release":
                blocks = drawn(used, wanted)
                for one in (order, twin):
                    one.release(blocks)
                used, free = used - set(blocks), free | set(blocks)
            case "empty":
                for block_id in drawn(bare, 1):
                    bare.remove(block_id)
                    for one in (order, twin):
                        one.release_empty(block_id)
            case _:
                blocks = drawn(used | free, wanted)
                revived = [block_id for block_id in blocks if block_id in free]
                for one in (order, twin):
                    one.begin(str(wanted))
                    one.touch(blocks, category)
                    one.revive(revived)
                used, free = used | set(revived), free - set(revived)
        assert len(order) == CAPACITY - len(bare) - len(used)


@pytest.mark.parametrize("name", EVICTIONS)
def test_of_a_chain_used_as_a_whole_the_tail_goes_first(name: str) -> None:
    """A chain without its head would be worth nothing, whatever the policy."""
    order = eviction_order(name, 6, Future([]))
    chain = order.take(4)
    order.store(chain, [1, 2, 3, 4], CATEGORIES[1])
    order.release(chain[::-1])
    for now_s in (1.0, 2.0):
        order.advance(now_s)
        order.touch(chain, CATEGORIES[1])
        order.revive(chain)
        order.release(chain[::-1])
    assert [*range(4, 6), *chain[::-1]] == order.take(6)


@pytest.mark.parametrize("name", EVICTIONS)
def test_after_a_reset_every_block_is_there_once(name: str) -> None:
    """What was learnt may stay, no block is lost."""
    order = eviction_order(name, 6, Future([]))
    blocks = order.take(5)
    order.store(blocks, [1, 2, 3, 4, 5], CATEGORIES[1])
    order.release(blocks)
    order.clear()
    assert len(order) == 6
    assert sorted(order.take(6)) == list(range(6))


def test_what_nobody_told_the_category_of_is_not_remembered() -> None:
    """So it displaces no memory of a known one, which shows only by it that it comes back."""
    order = WorkloadAware(1)

    def fill(content: int, category: Category | None) -> None:
        blocks = order.take(1)
        order.store(blocks, [content], category)
        order.release(blocks)

    fill(1, CATEGORIES[1])
    for content in range(2, 4 * REMEMBERED_PER_BLOCK):
        fill(content, None)
    order.advance(20.0)
    fill(1, CATEGORIES[1])
    assert [(fit.reused, fit.gaps_s) for fit in order._fits] == [(1, 20.0)]
