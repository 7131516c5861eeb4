"""Most hits, with and without a ceiling on load."""

from dataclasses import dataclass

import numpy as np

from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class MaxHit:
    """score = new prefill tokens, ties by batch size   [token].

    Token counts are whole numbers, so the batch size as a fraction below one breaks ties only.

    Args:
        name: as operators spell it.
        load_ceiling_ratio: an instance whose batch size would exceed this multiple of the fleet's
            mean (the arriving request counted, rounded up) is chosen only when all do, and then by
            batch size alone; infinite for no ceiling. Source of the ceiling: "Consistent Hashing
            with Bounded Loads", arXiv 1608.01350, with its customary 1.25.
    """

    name: str = "max_hit"
    load_ceiling_ratio: float = float("inf")

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        scores: Scores = fleet.new_prefill_tokens + tie_break(fleet.batch_size)
        if np.isinf(self.load_ceiling_ratio):
            return scores
        mean = (fleet.batch_size.sum() + 1) / len(fleet.instances)
        above = fleet.batch_size + 1 > np.ceil(self.load_ceiling_ratio * mean)
        # Above every score below the ceiling, whose largest is less than prompt tokens + 1.
        return np.where(above, request.prompt_tokens + 1 + fleet.batch_size, scores)
