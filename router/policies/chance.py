"""Chance, and the power of two choices."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.policies.draws import draws, order
from router.snapshot import FleetSnapshot, RequestView, Scores

CHOICES: Final = 2


@dataclass(frozen=True, slots=True)
class Random:
    """score = a draw for request and instance   [none]; ignores the cache and the load.

    Stateless: the same request goes to the same instance whoever routes it.
    """

    name: str = "random"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        return draws(request.request_id, fleet)


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """score = batch size of two instances drawn for the request   [request]; ignores the cache.

    Of two equals the first drawn wins; the others come behind, by batch size. Source: Mitzenmacher,
    "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12 (10), 2001.
    """

    name: str = "power_of_two"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        places = order(draws(request.request_id, fleet))
        scores: Scores = fleet.batch_size + places / len(places)
        return np.where(places < CHOICES, scores, scores + fleet.batch_size.max() + 1)
