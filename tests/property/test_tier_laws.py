"""The tier of the fast engines and that of the step-by-step ones keep the same blocks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.simulated.fast.tier import TierColumns
from workers.simulated.tier import KvTier, TierConfig

CHAINS = [
    [block if block < shared else (chain << 8) + block for block in range(length)]
    for chain, shared, length in ((1, 0, 3), (2, 2, 5), (3, 2, 9), (4, 4, 7), (5, 7, 200))
]
"""Some begin alike, one is longer than 64 blocks, which are handled at a time."""


@given(
    st.sampled_from([1, 2, 5, 8, 70, 300]),
    st.lists(st.tuples(st.integers(0, len(CHAINS) - 1), st.integers(0, 200)), max_size=60),
)
def test_both_tiers_hold_the_same_blocks(
    capacity_blocks: int, writes: list[tuple[int, int]]
) -> None:
    """After every write they find as much of every chain, and never hold more than they may."""
    config = TierConfig(capacity_blocks=capacity_blocks, tokens_per_s=1.0, latency_s=0.0)
    kept, columns = KvTier(config), TierColumns(config)
    columns.learn(1 + max(max(chain) for chain in CHAINS))
    for number, length in writes:
        written = CHAINS[number][:length]
        kept.write(written)
        columns.write(np.array(written, np.int64))
        assert len(kept) == len(columns) <= capacity_blocks
        for chain in CHAINS:
            for start in (0, 1, 3):
                found = columns.match(np.array(chain[start:], np.int64))
                assert kept.match(chain[start:]) == found
