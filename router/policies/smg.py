"""SMG's cache-aware routing."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores

LOAD_RATIO_MAX: Final = 1.5
LOAD_ABOVE_MEAN_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class SmgCacheAware:
    """The longest match, unless that instance is overloaded, then the least loaded.

    score = new prefill tokens, ties by batch size   [token]; when the instance of the lowest such
    score has a batch size > 1.5 x mean and > mean + 64: score = batch size   [request].

    Source: the SGLang gateway (SMG), `cache_aware.rs`. There, max > 1.5 x min and max - min > 64
    anywhere in the fleet suffices, and a match of 0.3 of the prompt or less counts as none. What it
    inserts into a tree of its own is here the index that all routers share, fed by engines' events
    and by requests in flight: better than a guess at what was sent where, so this is its best case.
    """

    name: str = "smg_cache_aware"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request  # its length is in new_prefill_tokens
        batch = fleet.batch_size
        scores: Scores = fleet.new_prefill_tokens + tie_break(batch)
        load, mean = batch[np.argmin(scores)], batch.mean()
        if load > LOAD_RATIO_MAX * mean and load > mean + LOAD_ABOVE_MEAN_MAX:
            return batch.astype(float)
        return scores
