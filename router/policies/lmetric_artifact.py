"""LMetric as its authors' artifact computes it, letter by letter."""

from dataclasses import dataclass

import numpy as np

from router.policies.draws import order
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class LMetricArtifact:
    """score = (queued + prompt - held tokens) x (batch size + 1), ties by slot   [token x request].

    Held are the prompt's leading tokens on the instance: not floored to the engine's own block, and
    all of them where it holds the whole prompt, though an engine computes the last token anyway;
    with nothing queued it then scores 0 at any batch size. Of equals the first in the fleet's order
    always wins. The router chooses by it and books, instead of letting the reservation choose.

    Source: blitz-serving/blitz-router, `lmetric.rs`, `dsl_runtime.rs`. Requests in flight count as
    holding what they are about to compute, as for all policies here; the artifact waits for events.
    """

    name: str = "lmetric_artifact"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        held = np.minimum(fleet.depth_tokens, request.prompt_tokens)
        # Siblings that were seen at the reservation only are in the hits, not in the depth.
        new_tokens = request.prompt_tokens - np.maximum(held, fleet.hit_tokens)
        product = (fleet.queued_prefill_tokens + new_tokens) * (fleet.batch_size + 1)
        scores: Scores = product + order(fleet.slot) / len(fleet.slot)
        return scores
