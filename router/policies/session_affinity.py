"""Same session, same instance."""

from dataclasses import dataclass

import numpy as np

from router.policies.draws import draws, order
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """score = place of the instance in the session's own order   [place]; ignores the cache.

    The order is a rendezvous hash: whoever leaves moves its own sessions only, and no table is
    kept. An instance whose batch size would exceed `load_ceiling_ratio` x the fleet's mean (the
    arriving request counted, rounded up) comes behind the others, by batch size. A request without
    a session is a session of its own. Sources: Thaler and Ravishankar, "Using Name-Based Mappings
    to Increase Hit Rates", 1998; the ceiling: arXiv 1608.01350, with its customary 1.25.
    """

    name: str = "session_affinity"
    load_ceiling_ratio: float = 1.25

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        places = order(draws(request.session_id or request.request_id, fleet))
        batch, count = fleet.batch_size, len(fleet.instances)
        ceiling = np.ceil(self.load_ceiling_ratio * (batch.sum() + 1) / count)
        return np.where(batch + 1 > ceiling, count + batch, places).astype(float)
