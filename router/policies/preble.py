"""Preble's exploitation and exploration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from router.policies.base import Remembering
from router.policies.load_window import LoadWindow
from router.policies.scales import tie_break
from router.snapshot import FleetSnapshot, RequestView, Scores

HIT_RATIO_MIN: Final = 0.5


@dataclass(frozen=True, slots=True)
class Preble:
    """The longest match where that is over half of the prompt, else the least recent work.

    If max(hit tokens) / prompt tokens > 0.5: score = new prefill tokens, ties by the requests sent
    to the instance in the last 3 minutes   [token]; else score = their prefill time + their decode
    time   [s].

    Sources: "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", arXiv 2407.00023;
    WukLab/preble and, per request rather than per tree node, blitz-router's port. Prefill time is
    linear in new tokens where Preble has a polynomial of one model on one card. Decode times are
    those of answers that have ended, and their mean for the others. Its tree is our index; it does
    not move prefixes between instances by itself. One scheduler sees all there: of several routers
    each remembers its own decisions only, which are a fair sample.
    """

    name: str = "preble"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance as a router that has sent nothing yet."""
        return self.score(request, fleet, LoadWindow(lambda: 0.0))

    def score(self, request: RequestView, fleet: FleetSnapshot, window: LoadWindow) -> Scores:
        """Score every instance, by what this router has sent to it."""
        counts, costs_s = window.loads(fleet.instances)
        if fleet.hit_tokens.max() > HIT_RATIO_MIN * request.prompt_tokens:
            scores: Scores = fleet.new_prefill_tokens + tie_break(counts)
            return scores
        return costs_s

    def remembering(self, clock: Callable[[], float]) -> Remembering:
        """With a window of its own."""
        window = LoadWindow(clock)
        return Remembering(
            name=self.name,
            memory=window,
            score=lambda request, fleet: self.score(request, fleet, window),
        )
