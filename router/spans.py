"""Spans of requests by OpenTelemetry's SDK, sent to a collector; an extra (`timestable[otel]`).

A span is told once its request has ended, from the laps that every request keeps anyway, so a
request that is not sampled costs next to nothing.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router import telemetry
from router.request_record import RequestRecord, RequestTrace, Stage
from router.tracing import TRACEPARENT, TRACESTATE

log = structlog.get_logger()

SERVICE: Final = "timestable-router"
TRACES_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 5.0
QUEUE_SPANS_MAX: Final = 16_384
"""Waiting for the collector; more are dropped, and requests go on."""

BATCH_SPANS_MAX: Final = 1024
EVERY_MS: Final = 1000
CLOSE_S: Final = 6.0
ATTRIBUTE_CHARACTERS_MAX: Final = 256
SERVER_ERROR_MIN: Final = 500

_NANOSECONDS: Final = 1_000_000_000

_ATTRIBUTES: Final[Mapping[str, str]] = {
    "request_id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "e2e_s": "gen_ai.latency.e2e",
    "api_key": "timestable.api_key",
    "fleet": "timestable.fleet",
    "policy": "timestable.policy",
    "reason": "timestable.reason",
    "instance_id": "timestable.instance_id",
    "hit_tokens": "timestable.hit_tokens",
    "cached_tokens": "timestable.cached_tokens",
    "new_prefill_tokens": "timestable.new_prefill_tokens",
    "queued_prefill_tokens": "timestable.queued_prefill_tokens",
    "batch_size": "timestable.batch_size",
    "score": "timestable.score",
    "retries_count": "timestable.retries_count",
    "degraded_cause": "timestable.degraded_cause",
    "outcome": "timestable.outcome",
}
"""Field of the record -> attribute; names of `gen_ai` are vLLM's."""

_ONWARD: Final = frozenset({TRACEPARENT, TRACESTATE})
_propagator: Final = TraceContextTextMapPropagator()


class SpanTracer:
    """See `tracing.Tracer`.

    Args:
        endpoint: base URL of the collector, or the whole one of its traces.
        sample_ratio: of traces that begin here.
    """

    def __init__(self, endpoint: str, sample_ratio: float) -> None:
        # What the SDK has to say of a collector that is away is counted and logged here, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        base = endpoint.rstrip("/")
        url = base if base.endswith(TRACES_PATH) else base + TRACES_PATH
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            span_limits=SpanLimits(max_span_attribute_length=ATTRIBUTE_CHARACTERS_MAX),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                CountingExporter(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S), url),
                max_queue_size=QUEUE_SPANS_MAX,
                max_export_batch_size=BATCH_SPANS_MAX,
                schedule_delay_millis=EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("timestable")

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> RequestTrace:
        """See `tracing.Tracer`."""
        came = {name: headers[name] for name in _ONWARD if name in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            context=_propagator.extract(came),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": path},
        )
        return SpanTrace(self._tracer, span)

    async def close(self) -> None:
        """See `tracing.Tracer`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.to_thread(self._provider.shutdown)
        except TimeoutError:
            log.warning("spans_not_sent", deadline_s=CLOSE_S)


class SpanTrace:
    """See `request_record.RequestTrace`.

    Args:
        tracer: makes the spans below.
        span: of the whole request.
    """

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        # Laps are monotonic, spans have wall clock.
        self._epoch_ns = time.time_ns() - int(time.monotonic() * _NANOSECONDS)

    @property
    def trace_id(self) -> str:
        """See `request_record.RequestTrace`."""
        return str(trace.format_trace_id(self._span.get_span_context().trace_id))

    def onward(self, headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """See `request_record.RequestTrace`."""
        ours: dict[str, str] = {}
        _propagator.inject(ours, context=trace.set_span_in_context(self._span))
        kept = (header for header in headers if header[0].lower() not in _ONWARD)
        return (*kept, *ours.items())

    def end(self, record: RequestRecord) -> None:
        """See `request_record.RequestTrace`."""
        if not self._span.is_recording():
            self._span.end()
            return
        for name, attribute in _ATTRIBUTES.items():
            if (value := getattr(record, name)) is not None:
                self._span.set_attribute(attribute, value)
        if record.status is not None:
            self._span.set_attribute("http.response.status_code", record.status)
        failed = record.outcome != "completed" or (record.status or 0) >= SERVER_ERROR_MIN
        if failed:
            self._span.set_status(trace.StatusCode.ERROR, record.outcome)
        self._tell_stages(record)
        self._span.end()

    def _tell_stages(self, record: RequestRecord) -> None:
        context = trace.set_span_in_context(self._span)
        attempts = iter(record.decisions)
        instance_id = None
        for lap in record.laps:
            child = self._tracer.start_span(
                lap.stage.value, context=context, start_time=self._wall_ns(lap.begun_s)
            )
            if lap.stage is Stage.RESERVE:
                decision = next(attempts, None)
                instance_id = decision.instance.instance_id if decision is not None else None
            if instance_id is not None:
                child.set_attribute("timestable.instance_id", instance_id)
            if lap.stage is Stage.FAILED:
                child.set_status(trace.StatusCode.ERROR)
            child.end(end_time=self._wall_ns(lap.ended_s))

    def _wall_ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * _NANOSECONDS)


class CountingExporter:
    """Counts spans by what became of them, and says when the collector goes and comes.

    Args:
        inner: sends them.
        url: where to.
    """

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self._url = url
        self._failing = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Send a batch, in the SDK's thread."""
        result = self._inner.export(spans)
        taken = result is SpanExportResult.SUCCESS
        telemetry.SPANS.labels(result="taken" if taken else "failed").inc(len(spans))
        if not taken and not self._failing:
            log.warning("collector_lost", url=self._url, effect="traces are dropped meanwhile")
        elif taken and self._failing:
            log.info("collector_found", url=self._url)
        self._failing = not taken
        return result

    def shutdown(self) -> None:
        """No more spans."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what waits."""
        return bool(self._inner.force_flush(timeout_millis))
