"""The product with the share of the prompt that is missed: LMetric without the queue."""

from dataclasses import dataclass

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class HitRatioProduct:
    """score = (1 - hit ratio) x (batch size + 1)   [request].

    A ratio knows what this request misses and not how much work it waits behind. For one request
    the prompt's length is a constant, so this orders instances as new prefill tokens x
    (batch size + 1) would. Source: the ablation of arXiv 2603.15202 that LMetric's first factor,
    in tokens, is compared with.
    """

    name: str = "hit_ratio_product"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        scores: Scores = fleet.new_prefill_tokens / request.prompt_tokens * (fleet.batch_size + 1)
        return scores
