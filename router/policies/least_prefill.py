"""Least prefill work: LMetric without the batch size."""

from dataclasses import dataclass

from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class LeastPrefill:
    """score = queued + new prefill tokens, ties by batch size   [token].

    Blind to what is being decoded: an instance with a full batch and an empty queue is idle to it.
    Source: the ablation of arXiv 2603.15202.
    """

    name: str = "least_prefill"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request  # its length is in new_prefill_tokens
        scores: Scores = (
            fleet.queued_prefill_tokens + fleet.new_prefill_tokens + tie_break(fleet.batch_size)
        )
        return scores
