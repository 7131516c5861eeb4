"""llm-d's default profile: weighted scorers."""

from dataclasses import dataclass

from router.policies.scales import min_max
from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class LlmDScorers:
    """score = 7 - (3 prefix + 2 queue + 2 KV$)   [none].

    prefix = hit tokens / prompt tokens; queue = 1 for the shortest waiting queue of this decision,
    0 for the longest, 1 for all where all are equal; KV$ = 1 - usage.

    Source: llm-d-inference-scheduler, its default profile and scorers; the highest sum wins there.
    Queue and usage are the engines' last reports, as stale there as here: what was sent since is
    in neither. Of equals one is drawn; the prefix is the index's, not a guess from characters.
    """

    name: str = "llm_d_scorers"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        prefix = fleet.hit_tokens / request.prompt_tokens
        queue = 1 - min_max(fleet.waiting_count)
        scores: Scores = 7 - (3 * prefix + 2 * queue + 2 * (1 - fleet.kv_usage_ratio))
        return scores
