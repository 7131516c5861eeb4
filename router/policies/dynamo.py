"""Dynamo's cost: prefill blocks still to compute and blocks being decoded."""

from dataclasses import dataclass

import numpy as np

from router.policies.scales import held_tokens
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class Dynamo:
    """score = max(0, queued prefill + request - hit) + decode   [block of the engine].

    Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs`, with its defaults
    (weights 1, temperature 0, no decay). Blocks are fractions there as well. Its decode blocks are
    what the router itself has assigned, from the decision on; here they are those that the engine's
    requests held at its last report, and what came since counts by its prefill only.
    """

    name: str = "dynamo"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        to_prefill = np.maximum(
            0, fleet.queued_prefill_tokens + request.prompt_tokens - fleet.hit_tokens
        )
        scores: Scores = (to_prefill + held_tokens(request, fleet)) / fleet.block_size_tokens
        return scores
