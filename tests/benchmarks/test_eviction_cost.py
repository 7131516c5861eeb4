"""What the workload-aware order of eviction costs inside vLLM, by number of categories."""

import time

import pytest

from workers.vllm.reuse_order import ReuseOrder

pytestmark = pytest.mark.benchmark

BLOCKS = 4096
EVICTIONS = 20_000


def evict(categories: int, at_once: int) -> float:
    """Microseconds of CPU for a block's way through a full pool: taken, filled, freed."""
    order = ReuseOrder(BLOCKS)
    stored = 0
    begun_s = 0.0
    for number in range((BLOCKS + EVICTIONS) // at_once):
        if number == BLOCKS // at_once:
            begun_s = time.process_time()
        now_s = number * 0.01
        blocks = order.evict(at_once, now_s)
        for block in blocks:
            order.store(block, stored % (2 * BLOCKS), f"chat:{stored % categories}", now_s)
            stored += 1
        order.release(blocks, now_s)
    return (time.process_time() - begun_s) / EVICTIONS * 1e6


@pytest.mark.parametrize("at_once", [1, 16, 256])
@pytest.mark.parametrize("categories", [1, 10, 60])
def test_eviction(categories: int, at_once: int) -> None:
    """One block while decoding, many for a prefill; contents come back after a round or two."""
    print(
        f"{categories} categories, {at_once} at once: {evict(categories, at_once):.1f} us a block"
    )
