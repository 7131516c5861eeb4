"""What is known of one request: filled in on its way, told once at its end."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from http import HTTPStatus
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

import structlog

from router import telemetry
from router.legs import Leg
from router.requests.api_call import ApiCall
from router.snapshot import Decision

log = structlog.get_logger()

# A series is looked up once; there are as many of them as the metric shows.
_decisions: Final = cache(telemetry.DECISIONS.labels)
_requests: Final = cache(telemetry.REQUESTS.labels)
_prompt_tokens: Final = cache(telemetry.PROMPT_TOKENS.labels)
_hit_tokens: Final = cache(telemetry.HIT_TOKENS_PREDICTED.labels)

STREAM_BYTES_PER_TOKEN: Final = 240
"""Of a chat stream of vLLM without usage: an event for each token, most of it always the same."""


class Stage(StrEnum):
    """What a request waits for, one after the other; see `telemetry.STAGE_SECONDS`."""

    RECEIVE = "receive"
    QUEUE = "queue"
    TOKENIZE = "tokenize"
    HASH = "hash"
    LOOK = "look"
    RESERVE = "reserve"
    FIRST_BYTE = "first_byte"
    PREFILL = "prefill"
    FAILED = "failed"
    ANSWER = "answer"


class Reason(StrEnum):
    """What a decision came to; see `telemetry.DECISIONS`."""

    ONLY = "only"
    NO_HITS = "no_hits"
    MOST_HITS = "most_hits"
    LESS_LOAD = "less_load"
    HELD = "held"


class Lap(NamedTuple):
    """A stage that has ended; monotonic seconds."""

    stage: Stage
    begun_s: float
    ended_s: float


class RequestTrace(Protocol):
    """A request's span, where a collector is told of requests."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    def onward(self, headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Headers for the engine: the client's, with this span as the parent of the engine's."""
        ...

    def end(self, record: "RequestRecord") -> None:
        """The request has ended."""
        ...


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of one request; the fields are the canonical line's.

    Times are seconds; None where the request did not get that far. `accepted_s`, `received_s` are
    monotonic and not logged. `laps` has every stage that has ended, in order; `decisions` has one
    for every instance tried; `on_decision` is told of each. `held_by` is who alone holds what the
    request names. `hot_class` is the standing of its class. `trace` is None without a collector.
    """

    request_id: str
    accepted_s: float
    received_s: float | None = None
    laps: list[Lap] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    on_decision: "Callable[[RequestRecord], None] | None" = None
    held_by: str | None = None
    trace: RequestTrace | None = None
    trace_id: str | None = None
    endpoint: str | None = None
    api_key: str | None = None
    model: str | None = None
    fleet: str | None = None
    policy: str | None = None
    instance_id: str | None = None
    prefill_instance_id: str | None = None
    reason: str | None = None
    prompts_count: int | None = None
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    in_flight_tokens: int | None = None
    tier_tokens: int | None = None
    new_prefill_tokens: int | None = None
    queued_prefill_tokens: int | None = None
    batch_size: int | None = None
    score: float | None = None
    hot_class: str | None = None
    hot_class_share: float | None = None
    approximate: bool = False
    degraded: bool = False
    degraded_cause: str | None = None
    retries_count: int = 0
    status: int | None = None
    stream: bool | None = None
    routing_s: float | None = None
    first_byte_added_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int | None = None
    prediction: str | None = None
    output_tokens: int | None = None
    output_bytes: int = 0
    outcome: str = "internal_error"

    def lap(self, stage: Stage) -> None:
        """A stage has ended; the next one begins."""
        begun_s = self.laps[-1].ended_s if self.laps else self.accepted_s
        self.laps.append(Lap(stage, begun_s, time.monotonic()))

    def onward(self, call: ApiCall) -> ApiCall:
        """The call as the engine is to see it: with this router as the one before it."""
        if self.trace is None:
            return call
        return replace(call, headers=self.trace.onward(call.headers))

    def note(self, decision: Decision, leg: Leg = Leg.WHOLE) -> None:
        """An instance was chosen and booked; a retry replaces what the one before it said.

        Of two legs the line has both instances, and what the choice of the first one rested on.
        """
        self.lap(Stage.RESERVE)
        self.decisions.append(decision)
        self.instance_id = decision.instance.instance_id
        if leg is not Leg.DECODE:
            self._note_hits(decision)
            self.prefill_instance_id = self.instance_id if leg is Leg.PREFILL else None
        held = self.held_by == self.instance_id
        reason = Reason.HELD if held else reason_of(decision)
        self.reason = self.reason if leg is Leg.DECODE else reason
        _decisions(decision.policy, reason).inc()
        if self.on_decision is not None:
            self.on_decision(self)

    def _note_hits(self, decision: Decision) -> None:
        self.hit_tokens = decision.hit_tokens
        self.in_flight_tokens = decision.in_flight_tokens
        if decision.snapshot.tier_tokens is not None:
            self.tier_tokens = decision.tier_tokens
        self.new_prefill_tokens = decision.new_prefill_tokens
        self.queued_prefill_tokens = decision.queued_prefill_tokens
        self.batch_size = decision.batch_size
        self.score = decision.score
        self.approximate = decision.approximate
        if decision.hot_class is not None:
            self.hot_class = decision.hot_class.standing
            self.hot_class_share = round(decision.hot_class.share, 6)

    def output_tokens_told(self) -> int:
        """What an API key is charged: as the engine says, else guessed from the stream's size."""
        if self.output_tokens is not None or not self.stream:
            return self.output_tokens or 0
        return self.output_bytes // STREAM_BYTES_PER_TOKEN

    def stage_seconds(self) -> dict[Stage, float]:
        """How long each stage took, all attempts together."""
        sums: dict[Stage, float] = {}
        for lap in self.laps:
            sums[lap.stage] = sums.get(lap.stage, 0.0) + lap.ended_s - lap.begun_s
        return sums


_NOT_LOGGED: Final = {
    *("accepted_s", "received_s", "laps", "decisions", "on_decision", "trace", "held_by"),
}
_LOGGED: Final = tuple(one.name for one in fields(RequestRecord) if one.name not in _NOT_LOGGED)

_logged: Final = attrgetter(*_LOGGED)
_SECONDS: Final = ("routing_s", "first_byte_added_s", "ttft_s", "e2e_s")
_STAGE_FIELDS: Final = {stage: f"{stage}_s" for stage in Stage}


def reason_of(decision: Decision) -> Reason:
    """What a decision came to, for counting."""
    hit_tokens = decision.snapshot.hit_tokens
    if len(hit_tokens) == 1:
        return Reason.ONLY
    most = hit_tokens.item(hit_tokens.argmax())
    if most == 0:
        return Reason.NO_HITS
    return Reason.MOST_HITS if decision.hit_tokens == most else Reason.LESS_LOAD


def tell(ended: RequestRecord) -> None:
    """Count a request that has ended and write its canonical line."""
    if ended.trace is not None:
        ended.trace.end(ended)
    stages = ended.stage_seconds()
    _count(ended, stages)
    line = dict(zip(_LOGGED, _logged(ended), strict=True))
    for name in _SECONDS:
        if line[name] is not None:
            line[name] = _to_us(line[name])
    for stage, seconds in stages.items():
        line[_STAGE_FIELDS[stage]] = _to_us(seconds)
    if ended.score is not None:
        line["score"] = round(ended.score, 6)
    if ended.prompt_tokens and ended.hit_tokens is not None:
        line["hit_ratio"] = round(ended.hit_tokens / ended.prompt_tokens, 4)
    else:
        line["hit_ratio"] = None
    log.info("request_routed", fields=line)


def _to_us(seconds: float) -> float:
    """Rounded; `round` searches for the shortest digits, at three times the cost."""
    return int(seconds * 1e6 + 0.5) / 1e6


def _count(ended: RequestRecord, stages: dict[Stage, float]) -> None:
    policy = ended.policy or ""
    _requests(ended.outcome, ended.status or "", policy).inc()
    for stage, seconds in stages.items():
        telemetry.STAGE_SECONDS.observe(stage, seconds)
    if ended.routing_s is not None:
        telemetry.ROUTING_SECONDS.observe("", ended.routing_s)
    if ended.first_byte_added_s is not None:
        telemetry.STAGE_SECONDS.observe("added", ended.first_byte_added_s)
    if ended.stream and ended.ttft_s is not None:
        telemetry.TTFT_SECONDS.observe(policy, ended.ttft_s)
    # A WebSocket lasts as long as its client likes.
    if (
        ended.outcome == "completed"
        and ended.e2e_s is not None
        and ended.status != HTTPStatus.SWITCHING_PROTOCOLS
    ):
        telemetry.E2E_SECONDS.observe(policy, ended.e2e_s)
    if ended.fleet is None or ended.hit_tokens is None:
        return
    if ended.approximate:
        by_text = ended.decisions[-1].snapshot.approximate
        telemetry.APPROXIMATE.labels("text" if by_text else "learned").inc()
    _prompt_tokens(ended.fleet).inc(ended.prompt_tokens or 0)
    _hit_tokens(ended.fleet).inc(ended.hit_tokens)
