"""Bailian's weighted draw."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.policies.draws import draws
from router.policies.scales import held_tokens, min_max
from router.snapshot import FleetSnapshot, RequestView, Scores

WEIGHT_MIN: Final = 1e-12
"""Whoever is worst in everything is all but never drawn."""


@dataclass(frozen=True, slots=True)
class Bailian:
    """score = -ln(draw) / weight   [none]: the lowest is i with a chance of weight i / all weights.

    weight = 0.7 norm(hit tokens) + 0.15 (1 - norm(batch size)) + 0.15 (1 - norm(tokens)),
    each norm min-max over the instances of this decision.

    Sources: arXiv 2603.15202 and its artifact (blitz-router, `bailian.rs`), which takes the first
    instance where all are equal; here all have the same weight then. The draw is one of request
    and instance, so it is the same whoever routes. Tokens are those that an instance's requests
    hold and those it has queued: the artifact counts prompts and outputs in the router, here the
    KV$ usage is the engine's last report, and a prompt in prefill may be in both for a moment.
    """

    name: str = "bailian"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        scores: Scores = -np.log(draws(request.request_id, fleet)) / self.weights(request, fleet)
        return scores

    def weights(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """What each instance's chance is in proportion to; above 0, at most 1."""
        tokens = held_tokens(request, fleet) + fleet.queued_prefill_tokens
        weights = (
            0.7 * min_max(fleet.hit_tokens)
            + 0.15 * (1 - min_max(fleet.batch_size))
            + 0.15 * (1 - min_max(tokens))
        )
        return np.maximum(weights, WEIGHT_MIN)
