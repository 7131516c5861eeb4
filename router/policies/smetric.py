"""SMetric v2: sessions stay where their KV$ is, as long as that is fast enough."""

from dataclasses import dataclass
from typing import Final

from router.policies.prefill_work import expected_ttft_s
from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores

SLO_BASE_S: Final = 1.0
SLO_S_PER_TOKEN: Final = 62.5e-6
"""The paper's bound on TTFT: 1 s, and 62.5 ms for each 1,000 tokens of the prompt."""

SLACK: Final = 1.0
"""Share of that bound at which a session moves. Not published; at 1 it moves when it has to."""

EVICTION_RATIO: Final = 0.5
"""Share of the history below which the best local hit means that the session is gone. Likewise."""


@dataclass(frozen=True, slots=True)
class SMetric:
    """A follow-up goes where most of it is held, a first turn to the least loaded.

    First turn: score = (queued + new prefill tokens) x (batch size + 1)   [token x request].
    Follow-up whose best holder is expected to begin its answer within slack x (1 s + 62.5 ms per
    1,000 prompt tokens): score = tokens not held, ties by that expected TTFT   [token].
    Otherwise the first rule, and the session lives there from then on. As a first turn counts a
    follow-up of whose history the best holder has less than `eviction_ratio`: its KV$ is evicted,
    or its context was compacted, so that what is held is not what it says now.

    Source: "SMetric", arXiv 2607.08565 v2. The turn is the number of answers in the prompt and
    needs no table of sessions. History is what comes before the end of the last of them; where it
    is not known, every round counts as long as the others: turn / (turn + 1) of the prompt.

    Args:
        name: as operators spell it.
        slack: see SLACK; 0 never stays, infinite always.
        eviction_ratio: see EVICTION_RATIO; 0 takes no session for evicted.
    """

    name: str = "smetric"
    slack: float = SLACK
    eviction_ratio: float = EVICTION_RATIO

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        if request.turn > 0 and not self._evicted(request, fleet):
            ttft_s = expected_ttft_s(request, fleet)
            deepest = fleet.hit_tokens == fleet.hit_tokens.max()
            if ttft_s[deepest].min() <= self.slack * slo_s(request):
                missing = request.prompt_tokens - fleet.hit_tokens
                stays: Scores = missing + tie_break(ttft_s)
                return stays
        prefill_tokens = fleet.queued_prefill_tokens + fleet.new_prefill_tokens
        product = (prefill_tokens * (fleet.batch_size + 1)).astype(float)
        return product if fleet.slowness is None else product * fleet.slowness / 1000

    def _evicted(self, request: RequestView, fleet: FleetSnapshot) -> bool:
        held = int(fleet.hit_tokens.max())
        return held < self.eviction_ratio * history_tokens(request)


def slo_s(request: RequestView) -> float:
    """When its answer should begin, at the latest."""
    return SLO_BASE_S + SLO_S_PER_TOKEN * request.prompt_tokens


def history_tokens(request: RequestView) -> float:
    """What of the prompt was there before, as far as is known."""
    if request.history_tokens is not None:
        return request.history_tokens
    return request.prompt_tokens * request.turn / (request.turn + 1)
