"""Weighted sum of a hit term and a load term: what has to be tuned."""

from dataclasses import dataclass

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class Linear:
    """score = w x (new prefill tokens / prompt tokens) + (1 - w) x (batch size / largest)   [none].

    The first term is 1 - hit ratio; an idle fleet has no load term. Which weight is good depends on
    the workload, so there are several: `SWEEP`. Source: the linear combinations to which arXiv
    2603.15202 compares; it leaves the scales open, these are ours.

    Args:
        weight_percent: w, in percent.
    """

    weight_percent: int

    def __post_init__(self) -> None:
        assert self.weight_percent in range(101), self.weight_percent

    @property
    def name(self) -> str:
        """With its weight in percent."""
        return f"linear_{self.weight_percent}"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        weight = self.weight_percent / 100
        missed = fleet.new_prefill_tokens / request.prompt_tokens
        load = fleet.batch_size / max(1, fleet.batch_size.max())
        scores: Scores = weight * missed + (1 - weight) * load
        return scores


SWEEP = tuple(Linear(percent) for percent in (10, 30, 50, 70, 90))
