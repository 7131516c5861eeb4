"""Metrics.

Labels are bounded: no request or session ids, and of an instance's id the part that a restart
keeps, removed when it has left.
"""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from router.fast_histogram import FastHistogram

SECONDS_SHORT: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
SECONDS_LONG: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)
STAGES: Final = (
    *("receive", "queue", "tokenize", "hash", "look", "reserve", "first_byte", "added", "failed"),
    *("prefill", "answer"),
)
SECONDS_STAGE: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)

PROCESS_RESTARTS: Final = Gauge(
    "timestable_router_process_restarts",
    "Processes that have died in the place of this one; which of --processes it is, by its label.",
    ["process"],
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
QUEUED_REQUESTS: Final = Gauge(
    "timestable_router_queued_requests", "Requests that wait for a place among those in flight."
)
QUEUE_SECONDS: Final = Histogram(
    "timestable_router_queue_seconds",
    "Waiting for a place, of requests that had to.",
    buckets=SECONDS_LONG,
)
KEY_REFUSALS: Final = Counter(
    "timestable_router_key_refusals",
    "Requests refused by a limit of their API key: requests, tokens, concurrent.",
    ["limit"],
)
KEY_LIMITS_ALONE: Final = Counter(
    "timestable_router_key_limits_alone",
    "Requests counted against their key by this router alone, because Redis did not answer.",
)
AUTH_REFUSALS: Final = Counter(
    "timestable_router_auth_refusals",
    "Requests without a right: no key, unknown key, model, operator.",
    ["cause"],
)
CONNECTIONS: Final = Gauge("timestable_router_connections", "Connections of clients.", ["port"])
CONNECTION_REFUSALS: Final = Counter(
    "timestable_router_connection_refusals",
    "Connections closed by the router: full, slow_headers, malformed.",
    ["cause"],
)
ADMISSION_REFUSALS: Final = Counter(
    "timestable_router_admission_refusals", "Requests refused at the door.", ["bound"]
)
STAGE_SECONDS: Final = FastHistogram(
    "timestable_router_stage_seconds",
    "What a request waits for in this router, by stage: receive (its body), queue (a place), "
    "tokenize, hash, look (index), reserve (choose and book), first_byte (of the engine's answer), "
    "added (that byte through this router), failed (an attempt), prefill (a prefill leg), answer "
    "(the rest of it).",
    label="stage",
    values=STAGES,
    buckets=SECONDS_STAGE,
)
DECISIONS: Final = Counter(
    "timestable_router_decisions",
    "Decisions by what they came to: only (one candidate), no_hits (nobody holds any of the "
    "prompt), most_hits (nobody holds more than the chosen one), less_load (somebody does), held "
    "(it alone holds the answer that the request names).",
    ["policy", "reason"],
)
LEGS: Final = Counter(
    "timestable_router_legs",
    "Legs of requests that one instance prefills and another one decodes: ok, failed (another "
    "attempt may follow), empty (the prefill has handed nothing over).",
    ["leg", "result"],
)
ROUTING_SECONDS: Final = FastHistogram(
    "timestable_router_routing_seconds",
    "Body received to request sent on.",
    buckets=SECONDS_SHORT,
)
TTFT_SECONDS: Final = FastHistogram(
    "timestable_router_time_to_first_token_seconds",
    "Request accepted to first byte out, streams only.",
    label="policy",
    buckets=SECONDS_LONG,
)
E2E_SECONDS: Final = FastHistogram(
    "timestable_router_e2e_request_latency_seconds",
    "Request accepted to last byte out, completed requests only.",
    label="policy",
    buckets=SECONDS_LONG,
)
TOKENIZER_SECONDS: Final = Histogram(
    "timestable_router_tokenizer_seconds",
    "Template and tokenization of one request, waiting for a thread included.",
    buckets=SECONDS_SHORT,
)
TOKENIZER_LOADED: Final = Gauge(
    "timestable_router_tokenizer_loaded", "1: loaded; 0: hits are estimated.", ["model"]
)
TOKENIZER_AGREES: Final = Gauge(
    "timestable_router_tokenizer_agrees",
    "1: engines asked make the same token ids; 0: one has another tokenizer or chat template.",
    ["model"],
)
TOKENIZER_ASKED: Final = Counter(
    "timestable_router_tokenizer_asked", "Engines asked for token ids, by what they said.", ["said"]
)
TOKENIZED_TOKENS: Final = Counter(
    "timestable_router_tokenized_tokens",
    "Tokens of texts: cached (seen before), new, whole (of tokenizers that cannot do parts).",
    ["how"],
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

PREFILLS_SEEN: Final = Counter(
    "timestable_router_prefills_seen",
    "First bytes from which the cost of prefill is fitted: used, left_out (behind too much else).",
    ["result"],
)
PREFILL_LINEAR: Final = Gauge(
    "timestable_router_prefill_seconds_per_token",
    "Fitted cost of prefill on the fleet's fastest device, for each uncached token.",
    ["fleet"],
)
PREFILL_ATTENTION: Final = Gauge(
    "timestable_router_prefill_seconds_per_pair",
    "Likewise, for each pair of an uncached token and one that it attends to.",
    ["fleet"],
)
NOTICES: Final = Counter(
    "timestable_router_notices",
    "Differences for sidecars: told, gone (another instance by now), too_many, too_long, "
    "queue_full, failed.",
    ["result"],
)
DEGRADED: Final = Counter(
    "timestable_router_degraded", "Decisions made without exact hits or fresh counters.", ["cause"]
)
APPROXIMATE: Final = Counter(
    "timestable_router_approximate",
    "Decisions whose hits are estimates: by text (no token ids), by learned (no KV events).",
    ["by"],
)
APPROXIMATE_HIT_TOKENS: Final = Counter(
    "timestable_router_approximate_hit_tokens_predicted",
    "Hit tokens of those decisions, where the engine told what they were.",
    ["fleet"],
)
APPROXIMATE_CACHED_TOKENS: Final = Counter(
    "timestable_router_approximate_cached_tokens_actual",
    "What the engine told, likewise.",
    ["fleet"],
)
RETRIES: Final = Counter(
    "timestable_router_retries", "Dispatches repeated before the first byte.", ["cause"]
)
UPSTREAM_FAILURES: Final = Counter(
    "timestable_router_upstream_failures",
    "Dispatches that failed: connect, reset, status, pushback, truncated, and timeouts by kind.",
    ["cause"],
)
CONTINUATIONS: Final = Counter(
    "timestable_router_continuations",
    "Broken streams of completions that another instance goes on with: begun, impossible.",
    ["result"],
)
STALE_CONNECTIONS: Final = Counter(
    "timestable_router_stale_connections",
    "Kept-alive connections that turned out to be closed; the request was sent on another one.",
)
EJECTIONS: Final = Counter(
    "timestable_router_ejections",
    "Instances left out for a while, by their last failure.",
    ["cause"],
)
EJECTED_INSTANCES: Final = Gauge(
    "timestable_router_ejected_instances", "Instances that this router leaves out now."
)
PROBES: Final = Counter(
    "timestable_router_probes", "Health checks of ejected instances: healthy, failed.", ["result"]
)
MULTI_PROMPT: Final = Counter(
    "timestable_router_multi_prompt_requests", "Requests with several prompts, routed by the first."
)
RESPONSES_LEARNED: Final = Counter(
    "timestable_router_responses_learned",
    "Answers that engines may hold, by what became of their ids: told (to all routers), unread (no "
    "id at the beginning), dropped (too many waited for Redis).",
    ["result"],
)
RESPONSES_NAMED: Final = Counter(
    "timestable_router_responses_named",
    "Requests that name such an answer: held (sent to the instance that holds it), gone (that one "
    "can take none), unknown (nobody knows who holds it), unavailable (Redis does not say).",
    ["result"],
)
RESPONSES_MISSING: Final = Counter(
    "timestable_router_responses_missing",
    "Those of them to which an engine said that it holds no such answer.",
)
HOT_CLASSES: Final = Gauge(
    "timestable_router_hot_classes",
    "Classes of requests so frequent that they may overload those who hold their prefix, of all "
    "routers: watched, taken_out (holders are no candidates). With detect_hot_prefixes only.",
    ["fleet", "standing"],
)
STEERED: Final = Counter(
    "timestable_router_steered_requests",
    "Requests decided by this router without the holders of their prefix.",
    ["fleet"],
)
UNJUDGED: Final = Counter(
    "timestable_router_unjudged_requests",
    "Requests that detect_hot_prefixes counted and did not judge: pool (another pool is eligible "
    "than the one they were counted in), holder (only the holder of an answer can take them).",
    ["reason"],
)
HOLDS: Final = Counter(
    "timestable_router_holds",
    "Reservations of requests that gateways send themselves: begun, released, expired unreleased.",
    ["result"],
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
SPANS: Final = Counter(
    "timestable_router_spans",
    "Spans by what the collector did: taken, failed. None without otlp_endpoint.",
    ["result"],
)
RECORDED: Final = Counter(
    "timestable_router_recorded_requests",
    "Answered requests by what became of their line of the trace: written, behind (the writer), "
    "full (the file), failed, refused (by the engine), several_prompts. None without record_trace.",
    ["result"],
)
INTERNAL_ERRORS: Final = Counter(
    "timestable_router_internal_errors", "Requests that ended in a defect of the router."
)
LOG_LINES_LOST: Final = Counter(
    "timestable_router_log_lines_lost", "Log lines that standard output did not take."
)


def instance_label(instance_id: str) -> str:
    """The part of an instance id that a restart keeps: host:port/rank."""
    return instance_id.partition("#")[0]
