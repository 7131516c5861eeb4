"""One after the other."""

from dataclasses import dataclass

import numpy as np

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """score = how many turns the instance still has to wait   [turn].

    Stateless: the turn is the request's sequence number modulo the number of instances, so each
    router goes round by itself.
    """

    name: str = "round_robin"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        count = len(fleet.instances)
        return ((np.arange(count) - request.sequence) % count).astype(float)
