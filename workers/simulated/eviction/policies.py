"""Eviction policies by name. Pure."""

from collections.abc import Callable
from typing import Final

from workers.simulated.eviction.base import EvictionOrder
from workers.simulated.eviction.belady import Belady, Future
from workers.simulated.eviction.fifo import FirstInFirstOut
from workers.simulated.eviction.gdfs import GreedyDualSizeFrequency
from workers.simulated.eviction.lfu import LeastFrequentlyUsed
from workers.simulated.eviction.lru import LeastRecentlyUsed
from workers.simulated.eviction.s3_fifo import S3Fifo
from workers.simulated.eviction.workload_aware import WorkloadAware

LRU: Final = "lru"
"""vLLM's own, and the default."""

BELADY: Final = "belady"
"""Needs a future."""

_ONLINE: Final[dict[str, Callable[[int], EvictionOrder]]] = {
    LRU: LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "gdfs": GreedyDualSizeFrequency,
    "s3_fifo": S3Fifo,
    "workload_aware": WorkloadAware,
}

EVICTIONS: Final = (*_ONLINE, BELADY)
"""All names."""


def eviction_order(name: str, capacity_blocks: int, future: Future | None = None) -> EvictionOrder:
    """All blocks of an instance, empty, under a policy of EVICTIONS.

    Args:
        name: of the policy.
        capacity_blocks: of the instance.
        future: what will be asked for; only `belady` looks at it, and must have it.
    """
    if name == BELADY:
        assert future is not None, "belady needs a future"
        return Belady(capacity_blocks, future)
    return _ONLINE[name](capacity_blocks)
