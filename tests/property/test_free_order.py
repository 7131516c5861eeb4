"""The free blocks of the fast engine stand in the order of the step-by-step one."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from workers.simulated.eviction.lru import LeastRecentlyUsed
from workers.simulated.fast.free_order import LeastRecentlyFreed

CAPACITY = 40

actions = st.lists(
    st.tuples(st.sampled_from(["take", "release", "empty", "revive"]), st.integers(1, CAPACITY)),
    max_size=100,
)


@given(actions, st.integers(0, 1 << 32))
@example([("take", 30), ("empty", 9), ("revive", 9), ("take", 5), ("release", 9)], 1)
@example([("take", CAPACITY), *[("release", 30), ("revive", 30)] * 10, ("release", 5)], 1)
def test_blocks_are_taken_in_the_same_order(actions: list[tuple[str, int]], seed: int) -> None:
    """Whatever is released, revived and taken, and in what portions."""
    rng = np.random.default_rng(seed)
    slow, fast = LeastRecentlyUsed(CAPACITY), LeastRecentlyFreed(CAPACITY)
    used: set[int] = set()
    empty: set[int] = set()  # freed without content: nothing there to hit
    for action, wanted in [*actions, ("take", CAPACITY)]:
        if action == "release":
            freed = rng.permutation(sorted(used))[:wanted].astype(np.intp)
            used -= set(freed.tolist())
            slow.release(freed.tolist())
            fast.release(freed)
        elif action == "empty":
            for block_id in rng.permutation(sorted(used))[:wanted].tolist():
                used.remove(block_id)
                empty.add(block_id)
                slow.release_empty(block_id)
                fast.release_empty(block_id)
        elif action == "revive":
            resident = sorted(set(range(CAPACITY)) - used - empty)
            revived = rng.permutation(resident)[:wanted].astype(np.intp)
            used |= set(revived.tolist())
            slow.revive(revived.tolist())
            fast.revive(revived)
        elif count := min(wanted, len(slow)):
            expected = slow.take(count)
            assert expected == fast.take(count).tolist()
            used |= set(expected)
            empty -= set(expected)
        assert len(slow) == len(fast)
