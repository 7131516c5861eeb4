"""The free blocks of the fast engine stand in the order of the step-by-step one."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from workers.simulated.eviction import LeastRecentlyUsed
from workers.simulated.fast.free_order import LeastRecentlyFreed

CAPACITY = 40

actions = st.lists(
    st.tuples(st.sampled_from(["take", "release", "revive"]), st.integers(1, CAPACITY)),
    max_size=100,
)


@given(actions, st.integers(0, 1 << 32))
@example([("take", CAPACITY), *[("release", 30), ("revive", 30)] * 10, ("release", 5)], 1)
def test_blocks_are_taken_in_the_same_order(actions: list[tuple[str, int]], seed: int) -> None:
    """Whatever is released, revived and taken, and in what portions."""
    rng = np.random.default_rng(seed)
    slow, fast = LeastRecentlyUsed(CAPACITY), LeastRecentlyFreed(CAPACITY)
    used: set[int] = set()
    for action, wanted in [*actions, ("take", CAPACITY)]:
        if action == "release":
            freed = rng.permutation(sorted(used))[:wanted].astype(np.intp)
            used -= set(freed.tolist())
            slow.release(freed.tolist())
            fast.release(freed)
        elif action == "revive":
            revived = rng.permutation(sorted(set(range(CAPACITY)) - used))[:wanted].astype(np.intp)
            used |= set(revived.tolist())
            for block_id in revived.tolist():
                slow.revive(block_id)
            fast.revive(revived)
        elif count := min(wanted, len(slow)):
            expected = [slow.evict() for _ in range(count)]
            assert expected == fast.take(count).tolist()
            used |= set(expected)
        assert len(slow) == len(fast)
