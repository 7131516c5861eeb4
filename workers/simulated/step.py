"""What goes into an engine step and what comes out of it."""

from dataclasses import dataclass
from typing import NamedTuple

from workers.simulated.kv_events import KvEvent
from workers.simulated.request import ActiveRequest, Request


class Admission(NamedTuple):
    """A waiting request entered the batch.

    Attributes:
        request: which.
        hit_tokens: of its prompt, resident on the device.
        tier_hit_tokens: of its prompt, behind those, loaded from the tier, or computed by another
            engine.
    """

    request: Request
    hit_tokens: int
    tier_hit_tokens: int = 0


class Token(NamedTuple):
    """One generated token: `position` counts from 0, `last` says the request has finished."""

    request: Request
    position: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step computes.

    Attributes:
        duration_s: virtual seconds it takes.
        admissions: requests that entered the batch for the first time.
        batch: requests in it with the tokens computed for each.
    """

    duration_s: float
    admissions: list[Admission]
    batch: list[tuple[ActiveRequest, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came out of a step: tokens in batch order, KV events in engine order."""

    tokens: list[Token]
    events: list[KvEvent]


@dataclass(slots=True, kw_only=True)
class EngineTotals:
    """Counters since the start; prefix figures are in tokens and count first admissions only.

    What was loaded from a tier is in `tier_hits_tokens`, not in `prefix_hits_tokens`; `tier_load_s`
    is the part of `busy_s` in which steps waited for loads, those of resumed requests included.
    """

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    tier_hits_tokens: int = 0
    tier_load_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemption_count: int = 0
    busy_s: float = 0.0

    def count(self, prompt_tokens: int, hit_tokens: int, tier_hit_tokens: int) -> None:
        """A request's first admission."""
        self.prefix_queries_tokens += prompt_tokens
        self.prefix_hits_tokens += hit_tokens
        self.tier_hits_tokens += tier_hit_tokens
