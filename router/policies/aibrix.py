"""AIBrix's prefix-cache routing."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores

IMBALANCE_MAX: Final = 8
"""Requests between the busiest and the idlest instance."""


@dataclass(frozen=True, slots=True)
class Aibrix:
    """Least loaded when batch sizes are more than 8 apart, else most hits among the less loaded.

    score = batch size   [request]   if max - min > 8; else
    score = new prefill tokens, ties by batch size   [token]   where batch size <= mean + 1
    standard deviation (of a sample), the others behind. Without any hits that is the least loaded.

    Source: vllm-project/aibrix, `prefix_cache.go`, as arXiv 2603.15202 compares to it. Later
    versions ask for max > 2 (mean + 1) as well, and then match among the idlest only. Its counts
    are of running requests, these of assigned ones; equals are drawn, there they are shuffled.
    """

    name: str = "aibrix"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        batch = fleet.batch_size
        if batch.max() - batch.min() > IMBALANCE_MAX:
            return batch.astype(float)
        scores: Scores = fleet.new_prefill_tokens + tie_break(batch)
        # Sorted: how it is rounded must not depend on the order of the fleet.
        spread = np.sort(batch).std(ddof=1) if len(batch) > 1 else 0.0
        crowded = batch > batch.mean() + spread
        # Behind every score of the others, whose largest is below prompt tokens + 1.
        return np.where(crowded, scores + request.prompt_tokens + 1, scores)
