"""Traces of requests: whose they are, and where they go when somebody collects them.

A client's W3C headers (`traceparent`, `tracestate`) are headers like others and reach the engine as
they came. With a collector (`otlp_endpoint`) the router has a span of its own in between.
"""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Final, Protocol

from router.request_record import RequestTrace

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


class Tracer(Protocol):
    """Begins the trace of each request."""

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> RequestTrace:
        """A request has come in.

        Args:
            method: its method.
            path: of the endpoint, one of a few.
            headers: the client's, case-insensitive.
        """
        ...

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


def trace_id_of(headers: Mapping[str, str]) -> str | None:
    """The trace that a request belongs to by its own word, for the log."""
    found = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, ""))
    return found[1] if found else None


class TracesUnavailable(Exception):  # noqa: N818 - names a condition
    """Traces are asked for, and the packages for them are not installed."""


@asynccontextmanager
async def tracing(endpoint: str | None, sample_ratio: float) -> AsyncIterator[Tracer | None]:
    """Whoever sends traces to this collector, until the context ends; None without one.

    Args:
        endpoint: base URL of an OTLP/HTTP collector.
        sample_ratio: of traces that begin here, 0..1; others are sampled as their beginners say.

    Raises:
        TracesUnavailable: the packages for it are not installed.
    """
    if endpoint is None:
        yield None
        return
    try:
        spans = import_module("router.spans")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise TracesUnavailable(
            "otlp_endpoint: traces need OpenTelemetry's packages: pip install 'timestable[otel]', "
            "or leave the option out"
        ) from None
    tracer: Tracer = spans.SpanTracer(endpoint, sample_ratio)
    try:
        yield tracer
    finally:
        await tracer.close()
