"""Fewest requests."""

from dataclasses import dataclass

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """score = batch size   [request]; ignores the cache."""

    name: str = "least_loaded"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request
        return fleet.batch_size.astype(float)
