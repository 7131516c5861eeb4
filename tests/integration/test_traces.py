"""Traces: W3C headers always go through; a collector is told of every request, stage by stage."""

import asyncio
import gzip
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from aiohttp import web
from fleets import chain, store
from listening import listening
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import REGISTRY
from router_edge import PROMPT, FakeEngine, completion, edge, failing, hang_up, stream_all
from waiting import until, until_equal

from router.composition import composed
from router.config import RouterConfig
from router.tracing import TracesUnavailable, trace_id_of

pytestmark = pytest.mark.integration

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
STAGES = ["receive", "queue", "tokenize", "hash", "look", "reserve", "first_byte", "answer"]


@dataclass
class Collector:
    """An OTLP/HTTP server that keeps what it is told.

    Attributes:
        status: with which it answers.
        spans: told so far.
    """

    status: int = 200
    spans: list[Any] = field(default_factory=list)
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        """One batch."""
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.status == 200:
            told = ExportTraceServiceRequest.FromString(body)
            for resource in told.resource_spans:
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
        return web.Response(status=self.status)

    def servers(self) -> list[Any]:
        """Spans of whole requests."""
        return [one for one in self.spans if one.kind == one.SPAN_KIND_SERVER]

    def below(self, span: Any) -> list[Any]:
        """Its children, in order of time."""
        found = [one for one in self.spans if one.parent_span_id == span.span_id]
        return sorted(found, key=lambda one: one.start_time_unix_nano)


@asynccontextmanager
async def collecting(status: int = 200) -> AsyncIterator[Collector]:
    """A collector on a free port."""
    collector = Collector(status)
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with listening(app) as collector.url:
        yield collector


def attributes(span: Any) -> dict[str, Any]:
    """By name, as they were set."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def post(client: Any, headers: dict[str, str], **changes: Any) -> int:
    """A whole completion; its status."""
    async with client.post(
        "/v1/completions", json=completion(**changes), headers=headers
    ) as answer:
        await answer.read()
        return int(answer.status)


async def test_without_a_collector_w3c_headers_pass_as_they_came(
    redis_client: redis.asyncio.Redis, redis_socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's parent is the client, and the log names the trace."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine) as one:
        assert await post(one.client, HEADERS) == 200
        sent = {name: engine.headers[0][name] for name in HEADERS}
        assert sent == HEADERS
    assert TRACE in capsys.readouterr().out


async def test_a_collector_is_told_of_a_request_and_its_stages(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """A span below the client's, the engine's to be below it, and a child for every stage."""
    engine = FakeEngine("a", stream_all)
    async with (
        collecting() as collector,
        edge(redis_client, redis_socket, engine, otlp_endpoint=collector.url) as one,
    ):
        assert await post(one.client, HEADERS | {"x-request-id": "r1"}) == 200
        await until(collector.servers, "a span of the request")
        (span,) = collector.servers()
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert engine.headers[0]["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
        assert engine.headers[0].getall("tracestate") == ["vendor=1"]
        assert span.name == "POST /v1/completions"
        said = attributes(span)
        assert said["gen_ai.request.id"] == "r1"
        assert said["timestable.instance_id"] == "a"
        assert said["timestable.outcome"] == "completed"
        assert said["gen_ai.usage.prompt_tokens"] == 64
        await until_equal(STAGES, lambda: [child.name for child in collector.below(span)])
        children = collector.below(span)
        assert children[0].start_time_unix_nano >= span.start_time_unix_nano - 5_000_000
        assert all(c.end_time_unix_nano >= c.start_time_unix_nano for c in children)
        ends = [child.end_time_unix_nano for child in children[:-1]]
        assert ends == [child.start_time_unix_nano for child in children[1:]]


async def test_a_retry_and_an_error_are_seen(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Each attempt names its instance; a request that failed is an error."""
    engines = FakeEngine("a", hang_up), FakeEngine("b", failing(500))
    async with (
        collecting() as collector,
        edge(redis_client, redis_socket, *engines, otlp_endpoint=collector.url) as one,
    ):
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:3])  # so a comes first
        assert await post(one.client, {}) == 500
        await until(lambda: len(collector.spans) > len(STAGES), "all spans")
        (span,) = collector.servers()
        assert span.status.code == span.status.STATUS_CODE_ERROR
        below = [
            (c.name, attributes(c).get("timestable.instance_id")) for c in collector.below(span)
        ]
        assert ("failed", "a") in below
        assert ("first_byte", "b") in below


async def test_a_client_that_is_not_sampled_is_not_told(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """The beginner of a trace decides; the engine hears the same."""
    engine = FakeEngine("a", stream_all)
    async with (
        collecting() as collector,
        edge(redis_client, redis_socket, engine, otlp_endpoint=collector.url) as one,
    ):
        await post(one.client, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await post(one.client, {})
        await until(collector.servers, "a span of the second request")
        assert engine.headers[0]["traceparent"].startswith(f"00-{TRACE}-")
        assert engine.headers[0]["traceparent"].endswith("-00")
    assert [span.trace_id.hex() == TRACE for span in collector.servers()] == [False]


async def test_a_collector_that_is_away_costs_no_request(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Requests go on, what is lost is counted, and the router stops in time."""

    def failed() -> float:
        labels = {"result": "failed"}
        return REGISTRY.get_sample_value("timestable_router_spans_total", labels) or 0.0

    before = failed()
    loop = asyncio.get_running_loop()
    async with (
        collecting(status=400) as collector,
        edge(
            redis_client, redis_socket, FakeEngine("a", stream_all), otlp_endpoint=collector.url
        ) as one,
    ):
        assert await post(one.client, {}) == 200
        await until(lambda: failed() > before, "lost spans are counted")
        begun_s = loop.time()
    assert loop.time() - begun_s < 8


async def test_without_the_packages_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that cannot be followed is an error at the start."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "router.spans", raising=False)
    config = RouterConfig(redis_url=f"unix://{tmp_path}/none", port=0, otlp_endpoint="http://h:1")
    with pytest.raises(TracesUnavailable, match=r"pip install 'timestable\[otel\]'"):
        async with composed(config):
            pass


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ],
)
def test_what_is_no_traceparent_names_no_trace(value: str) -> None:
    """A header of a client's is not a log field unless it is what it says."""
    assert trace_id_of({"traceparent": value}) is None
    assert trace_id_of(HEADERS) == TRACE
