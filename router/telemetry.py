"""Metrics and the canonical log line.

Labels are bounded: no request or session ids, and of an instance's id the part that a restart
keeps, removed when it has left.
"""

from dataclasses import dataclass, fields
from typing import Final

import structlog
from prometheus_client import Counter, Gauge, Histogram

log = structlog.get_logger()

SECONDS_SHORT: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
SECONDS_LONG: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)

REQUESTS: Final = Counter(
    "timestable_router_requests", "Requests ended.", ["outcome", "status", "policy"]
)
IN_FLIGHT_REQUESTS: Final = Gauge(
    "timestable_router_in_flight_requests", "Requests admitted and not yet ended."
)
IN_FLIGHT_BYTES: Final = Gauge(
    "timestable_router_in_flight_bytes", "Bytes of request bodies held for requests in flight."
)
ADMISSION_REFUSALS: Final = Counter(
    "timestable_router_admission_refusals", "Requests refused at the door.", ["bound"]
)
ROUTING_SECONDS: Final = Histogram(
    "timestable_router_routing_seconds",
    "Body received to request sent on.",
    buckets=SECONDS_SHORT,
)
FIRST_BYTE_ADDED_SECONDS: Final = Histogram(
    "timestable_router_first_byte_added_seconds",
    "First upstream byte to first byte out.",
    buckets=SECONDS_SHORT,
)
TTFT_SECONDS: Final = Histogram(
    "timestable_router_ttft_seconds",
    "Request accepted to first byte out, streams only.",
    ["policy"],
    buckets=SECONDS_LONG,
)
E2E_SECONDS: Final = Histogram(
    "timestable_router_e2e_seconds",
    "Request accepted to last byte out, completed requests only.",
    ["policy"],
    buckets=SECONDS_LONG,
)
TOKENIZER_SECONDS: Final = Histogram(
    "timestable_router_tokenizer_seconds",
    "Template and tokenization of one request, waiting for a thread included.",
    buckets=SECONDS_SHORT,
)
TOKENIZER_LOADED: Final = Gauge(
    "timestable_router_tokenizer_loaded", "1: loaded; 0: its requests get no hits.", ["model"]
)
PROMPT_TOKENS: Final = Counter(
    "timestable_router_prompt_tokens", "Prompt tokens of decided requests.", ["fleet"]
)
HIT_TOKENS_PREDICTED: Final = Counter(
    "timestable_router_hit_tokens_predicted", "Hit tokens at the decision.", ["fleet"]
)
PREDICTIONS: Final = Counter(
    "timestable_router_predictions",
    "Hit tokens at the decision against cached tokens reported: exact, over, under.",
    ["fleet", "instance", "result"],
)
COMPARED_PROMPT_TOKENS: Final = Counter(
    "timestable_router_compared_prompt_tokens", "Of requests compared.", ["fleet", "instance"]
)
COMPARED_PREDICTED_TOKENS: Final = Counter(
    "timestable_router_compared_hit_tokens_predicted",
    "Hit tokens at the decision, of requests compared.",
    ["fleet", "instance"],
)
CACHED_TOKENS_ACTUAL: Final = Counter(
    "timestable_router_cached_tokens_actual",
    "Cached tokens that engines reported, of requests compared.",
    ["fleet", "instance"],
)
EXACT_RATIO: Final = Gauge(
    "timestable_router_exact_prediction_ratio",
    "Requests predicted to the token / requests compared, 0..1, of the last 10 minutes.",
    ["fleet"],
)
COMPLETENESS: Final = Gauge(
    "timestable_router_instance_completeness_ratio",
    "Share of what an engine holds that its sidecar knows of, 0..1, as it says itself.",
    ["fleet", "instance"],
)
BY_INSTANCE: Final = (
    *(COMPARED_PROMPT_TOKENS, COMPARED_PREDICTED_TOKENS, CACHED_TOKENS_ACTUAL, COMPLETENESS),
)
"""Besides PREDICTIONS: series that go when their instance goes."""

NOTICES: Final = Counter(
    "timestable_router_notices",
    "Differences for sidecars: told, gone (another instance by now), too_many, too_long, "
    "queue_full, failed.",
    ["result"],
)
DEGRADED: Final = Counter(
    "timestable_router_degraded", "Decisions made without prefix hits or fresh counters.", ["cause"]
)
RETRIES: Final = Counter(
    "timestable_router_retries", "Dispatches repeated before the first byte.", ["cause"]
)
MULTI_PROMPT: Final = Counter(
    "timestable_router_multi_prompt_requests", "Requests with several prompts, routed by the first."
)
INDEX_ERRORS: Final = Counter(
    "timestable_router_index_errors", "Calls to Redis that failed or came too late.", ["call"]
)
INDEX_OPEN: Final = Gauge(
    "timestable_router_index_open",
    "1: Redis does not answer, decisions are made without it at once; 0: it is asked.",
)
INDEX_OPENINGS: Final = Counter("timestable_router_index_openings", "How often that began.")
RESERVATIONS: Final = Counter(
    "timestable_router_reservations", "Answers of Redis to choose-and-book.", ["status"]
)
LEDGER_NOTES: Final = Counter(
    "timestable_router_ledger_notes", "Notes on reservations sent to Redis.", ["kind"]
)
LEDGER_ERRORS: Final = Counter(
    "timestable_router_ledger_errors", "Rounds of ledger notes that Redis did not take."
)
LEDGER_CORRECTIONS: Final = Counter(
    "timestable_router_ledger_corrections",
    "Reservations in Redis corrected to this router's books.",
)
LEASES_LOST: Final = Counter(
    "timestable_router_leases_lost", "Registrations of this router that others have reaped."
)
REAPED: Final = Counter(
    "timestable_router_reaped_reservations", "Reservations of dead routers taken back."
)
INTERNAL_ERRORS: Final = Counter(
    "timestable_router_internal_errors", "Requests that ended in a defect of the router."
)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of one request at its end; the fields are the canonical line's.

    Times are seconds; None where the request did not get that far. `accepted_s`, `received_s` are
    monotonic and not logged.
    """

    request_id: str
    accepted_s: float
    received_s: float | None = None
    model: str | None = None
    fleet: str | None = None
    policy: str | None = None
    instance_id: str | None = None
    prompts_count: int | None = None
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    in_flight_tokens: int | None = None
    new_prefill_tokens: int | None = None
    queued_prefill_tokens: int | None = None
    batch_size: int | None = None
    score: float | None = None
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
    output_bytes: int = 0
    outcome: str = "internal_error"


_LOGGED: Final = tuple(
    field.name for field in fields(RequestRecord) if field.name not in {"accepted_s", "received_s"}
)


def instance_label(instance_id: str) -> str:
    """The part of an instance id that a restart keeps: host:port/rank."""
    return instance_id.partition("#")[0]


def record(ended: RequestRecord) -> None:
    """Count a request that has ended and write its canonical line."""
    _count(ended)
    line: dict[str, object] = {}
    for name in _LOGGED:
        value = getattr(ended, name)
        line[name] = round(value, 6) if isinstance(value, float) else value
    if ended.prompt_tokens and ended.hit_tokens is not None:
        line["hit_ratio"] = round(ended.hit_tokens / ended.prompt_tokens, 4)
    else:
        line["hit_ratio"] = None
    log.info("request_routed", **line)


def _count(ended: RequestRecord) -> None:
    policy = ended.policy or ""
    REQUESTS.labels(ended.outcome, str(ended.status or ""), policy).inc()
    if ended.routing_s is not None:
        ROUTING_SECONDS.observe(ended.routing_s)
    if ended.first_byte_added_s is not None:
        FIRST_BYTE_ADDED_SECONDS.observe(ended.first_byte_added_s)
    if ended.stream and ended.ttft_s is not None:
        TTFT_SECONDS.labels(policy).observe(ended.ttft_s)
    if ended.outcome == "completed" and ended.e2e_s is not None:
        E2E_SECONDS.labels(policy).observe(ended.e2e_s)
    if ended.fleet is None or ended.hit_tokens is None:
        return
    PROMPT_TOKENS.labels(ended.fleet).inc(ended.prompt_tokens or 0)
    HIT_TOKENS_PREDICTED.labels(ended.fleet).inc(ended.hit_tokens)
