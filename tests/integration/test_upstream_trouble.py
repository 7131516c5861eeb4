"""Engines that fail in every way a socket allows: what is tried elsewhere, and what clients see."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from byte_engine import CHUNKED, STREAM, ByteEngine, Connection, chunk, plain, saying
from fleets import chain, reserved, store
from free_ports import free_ports
from prometheus_client import REGISTRY
from router_edge import CHUNKS, LAST_CHUNKS, PROMPT, Edge, FakeEngine, completion, edge, stream_all
from waiting import until

pytestmark = pytest.mark.integration

WHOLE = b"".join((*CHUNKS, *LAST_CHUNKS))
PUSHBACK = b'{"error":{"message":"full"}}'


@dataclass
class Elsewhere:
    """An address where no engine answers."""

    name: str
    url: str

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Elsewhere"]:
        """Nothing is there."""
        yield self


def counted(name: str, **labels: str) -> float:
    """A counter's value."""
    return REGISTRY.get_sample_value(f"timestable_router_{name}_total", labels) or 0.0


async def ask(one: Edge, **changes: Any) -> tuple[int, bytes, str | None]:
    """Status, body and instance of one completion."""
    async with one.client.post("/v1/completions", json=completion(**changes)) as answer:
        return answer.status, await answer.read(), answer.headers.get("x-timestable-instance")


async def prefer_the_first(redis_client: Any, one: Edge) -> None:
    """Every block of the prompt is on slot 0, so it is chosen."""
    await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:4])


def errors_in(stream: bytes) -> list[dict[str, Any]]:
    """What a client's parser makes of a stream: the errors of its events."""
    found = []
    for event in stream.split(b"\n\n"):
        data = b"".join(
            line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data:")
        )
        try:
            value = json.loads(data)
        except ValueError:
            continue
        if "error" in value:
            found.append(value["error"])
    return found


# -- before the first byte ------------------------------------------------------------------------


BEFORE_FIRST_BYTE = {
    "closes": (saying(), "reset"),
    "resets": (saying(reset=True), "reset"),
    "half a head": (saying(b"HTTP/1.1 200 OK\r\nContent-"), "reset"),
    "a head too large": (saying(CHUNKED[:-2] + b"X: " + b"x" * 70_000 + b"\r\n\r\n"), "reset"),
    "a header that is none": (saying(plain(b"200 OK", b"{}", b"X: a\x01b")), "reset"),
    "another protocol": (saying(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"), "reset"),
    "not HTTP": (saying(b"220 smtp ready\r\n\r\n"), "reset"),
    "head and no body": (saying(CHUNKED), "reset"),
    "a chunk without length": (saying(CHUNKED, b"zz\r\n"), "reset"),
    "an empty stream": (saying(CHUNKED, b"0\r\n\r\n"), "truncated"),
    "502": (saying(plain(b"502 Bad Gateway", b"{}")), "status"),
    "503": (saying(plain(b"503 Service Unavailable", b"{}")), "pushback"),
    "504": (saying(plain(b"504 Gateway Timeout", b"{}")), "status"),
    "429": (saying(plain(b"429 Too Many Requests", b"{}")), "pushback"),
}


@pytest.mark.parametrize("trouble", BEFORE_FIRST_BYTE)
async def test_before_the_first_byte_another_instance_answers(
    redis_client, redis_socket, trouble: str
) -> None:
    """The client sees one good answer; the cause is counted, and both reservations end."""
    answer, cause = BEFORE_FIRST_BYTE[trouble]
    bad, good = ByteEngine("bad", answer), FakeEngine("good", stream_all)
    async with edge(redis_client, redis_socket, bad, good) as one:
        await prefer_the_first(redis_client, one)
        before = counted("retries", cause=cause)
        assert await ask(one) == (200, WHOLE, "good")
        assert (len(bad.bodies), counted("retries", cause=cause)) == (1, before + 1)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 2"], ids=["nothing", "a byte"])
async def test_a_kept_connection_is_replaced_only_if_nothing_came(
    redis_client, redis_socket, begun: bytes
) -> None:
    """Then the engine had closed it; else it has begun, and another one is asked as ever."""
    connections: list[Connection] = []

    async def once(connection: Connection) -> None:
        connections.append(connection)
        await connection.send(CHUNKED + chunk(WHOLE) + b"0\r\n\r\n")
        if len(connections) > 1:
            return
        await connection.reader.readuntil(b"\r\n\r\n")  # the second request on it
        await connection.send(begun)

    bad, good = ByteEngine("bad", once), FakeEngine("good", stream_all)
    async with edge(redis_client, redis_socket, bad, good) as one:
        await prefer_the_first(redis_client, one)
        assert await ask(one) == (200, WHOLE, "bad")
        before = counted("retries", cause="reset"), counted("stale_connections")
        assert await ask(one) == (200, WHOLE, "good" if begun else "bad")
        after = counted("retries", cause="reset"), counted("stale_connections")
        assert (after[0] - before[0], after[1] - before[1]) == ((1, 0) if begun else (0, 1))
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


@asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """An address that accepts no further connection and refuses none."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
        for one in waiting:
            one.close()


@pytest.mark.parametrize("where", ["refuses", "is deaf", "has no name"])
async def test_who_cannot_be_reached_is_not_waited_for(
    redis_client, redis_socket, where: str
) -> None:
    """A refusal, no answer to the handshake, a name that nobody knows or that is looked up long."""
    async with deaf() as deaf_url:
        urls = {
            "refuses": f"http://127.0.0.1:{free_ports(1)[0]}",
            "is deaf": deaf_url,
            "has no name": "http://engine.invalid:8000",
        }
        bad, good = Elsewhere("bad", urls[where]), FakeEngine("good", stream_all)
        async with edge(redis_client, redis_socket, bad, good, connect_timeout_s=0.3) as one:
            await prefer_the_first(redis_client, one)
            causes = {"is deaf": ["connect-timeout"], "refuses": ["connect"]}.get(
                where, ["connect", "connect-timeout"]
            )
            before = sum(counted("retries", cause=cause) for cause in causes)
            async with asyncio.timeout(3):
                assert await ask(one) == (200, WHOLE, "good")
            assert sum(counted("retries", cause=cause) for cause in causes) == before + 1
            await one.settled()
            assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


# -- push-back ------------------------------------------------------------------------------------


async def test_pushback_is_tried_elsewhere_once_and_then_passed_on(
    redis_client, redis_socket
) -> None:
    """Unchanged, with what it says of coming back; a third one is left alone, nobody is ejected."""
    full = saying(plain(b"429 Too Many Requests", PUSHBACK, b"Retry-After: 7"))
    engines = [ByteEngine(name, full) for name in "abc"]
    async with edge(redis_client, redis_socket, *engines, ejection_failures_min=1) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert (answer.status, await answer.read()) == (429, PUSHBACK)
            assert answer.headers["Retry-After"] == "7"
        assert sorted(len(engine.bodies) for engine in engines) == [0, 1, 1]
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert [instance["ejection"] for instance in instances] == [None] * 3
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 3


@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error"])
async def test_an_engines_own_word_is_passed_on_as_it_is(
    redis_client, redis_socket, status: bytes
) -> None:
    """A bad request is bad everywhere, and a 500 may be what the request does to an engine."""
    engines = [ByteEngine(name, saying(plain(status, PUSHBACK))) for name in "ab"]
    async with edge(redis_client, redis_socket, *engines) as one:
        found, body, _ = await ask(one)
        assert (found, body) == (int(status[:3]), PUSHBACK)
        assert sorted(len(engine.bodies) for engine in engines) == [0, 1]
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 2


# -- after the first byte -------------------------------------------------------------------------


MID_STREAM = {
    "closes in an event": (saying(CHUNKED, chunk(CHUNKS[0]), chunk(b'data: {"cho')), "reset"),
    "closes in a chunk": (saying(CHUNKED, chunk(CHUNKS[0]), b"40\r\ndata: {"), "reset"),
    "resets": (saying(CHUNKED, chunk(CHUNKS[0]), reset=True), "reset"),
    "breaks the framing": (saying(CHUNKED, chunk(CHUNKS[0]), b"zz\r\n"), "reset"),
    "ends without [DONE]": (saying(CHUNKED, chunk(CHUNKS[0]), b"0\r\n\r\n"), "truncated"),
    "ends by closing": (saying(STREAM + b"\r\n", CHUNKS[0], CHUNKS[1][:9]), "truncated"),
}


@pytest.mark.parametrize("trouble", MID_STREAM)
async def test_a_stream_never_ends_silently(redis_client, redis_socket, trouble: str) -> None:
    """What came before stays as it was; the last event is an error, and the stream is closed."""
    answer, cause = MID_STREAM[trouble]
    engines = [ByteEngine(name, answer) for name in "ab"]
    async with edge(redis_client, redis_socket, *engines) as one:
        before = counted("upstream_failures", cause=cause)
        status, received, _ = await ask(one)
        assert (status, received[: len(CHUNKS[0])]) == (200, CHUNKS[0])
        assert [error["code"] for error in errors_in(received)] == ["upstream-failed"]
        assert received.endswith(b"\n\n")
        assert counted("upstream_failures", cause=cause) == before + 1
        assert sorted(len(engine.bodies) for engine in engines) == [0, 1]  # no retry after a byte
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


WITH_A_LENGTH = {
    "stream": STREAM + b"Content-Length: %d\r\n\r\n" % (len(CHUNKS[0]) + 20) + CHUNKS[0],
    "json": plain(b"200 OK", b'{"choices":[]}' * 9)[:-20],
    "chunked json": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b'{"choices":'),
}


@pytest.mark.parametrize("kind", WITH_A_LENGTH)
async def test_what_cannot_hold_an_event_breaks_visibly(
    redis_client, redis_socket, kind: str
) -> None:
    """An answer that is not a stream, or whose length is told: no part of it passes for all."""
    engine = ByteEngine("a", saying(WITH_A_LENGTH[kind]))
    async with edge(redis_client, redis_socket, engine) as one:
        with pytest.raises(aiohttp.ClientError):
            await ask(one, stream=kind == "stream")
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


# -- timeouts -------------------------------------------------------------------------------------


async def dribble(connection: Connection) -> None:
    """A chunk every now and then, for ever."""
    await connection.send(CHUNKED)
    while True:
        await connection.send(chunk(CHUNKS[0]))


async def hang(connection: Connection) -> None:
    """Take the request and say nothing."""
    await connection.gone()
    raise ConnectionResetError


@pytest.mark.parametrize(
    ("answer", "config", "cause", "status"),
    [
        (hang, {"first_byte_timeout_s": 0.3}, "first-byte-timeout", 504),
        (hang, {"total_timeout_s": 0.3}, "total-timeout", 504),
        (dribble, {"total_timeout_s": 0.5}, "total-timeout", 200),
    ],
    ids=["no first byte", "total before the first byte", "total in mid-stream"],
)
async def test_each_timeout_has_its_own_name(
    *, redis_client, redis_socket, answer, config, cause: str, status: int
) -> None:
    """It ends the request at the engine, is asked of nobody else, and the reservation ends."""
    engines = [ByteEngine(name, answer) for name in "ab"]
    async with edge(redis_client, redis_socket, *engines, **config) as one:
        before = counted("upstream_failures", cause=cause)
        found, received, _ = await ask(one)
        assert found == status
        errors = errors_in(b"data: " + received if status == 504 else received)
        assert [error["code"] for error in errors] == ["upstream-timeout"]
        assert counted("upstream_failures", cause=cause) == before + 1
        await until(lambda: sum(engine.left for engine in engines), "the engine is told")
        assert sorted(len(engine.bodies) for engine in engines) == [0, 1]
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


# -- ejection -------------------------------------------------------------------------------------


async def ejections(one: Edge) -> list[str | None]:
    """Cause of each instance's ejection, as operators see it."""
    async with one.client.get("/fleet") as answer:
        instances = (await answer.json())["fleets"][0]["instances"]
    return [instance["ejection"] and instance["ejection"]["cause"] for instance in instances]


async def test_an_instance_is_ejected_probed_and_back(redis_client, redis_socket) -> None:
    """No request is risked on it until a health check was answered; then one is sent there."""
    port = free_ports(1)[0]
    bad = Elsewhere("bad", f"http://127.0.0.1:{port}")
    engines = bad, FakeEngine("good", stream_all)
    paths: list[bytes] = []

    async def healthy(connection: Connection) -> None:
        paths.append(b"asked")
        await connection.send(plain(b"200 OK", b""))

    async with edge(redis_client, redis_socket, *engines, ejection_lease_s=0.5) as one:
        await prefer_the_first(redis_client, one)
        before = counted("retries", cause="connect"), counted("ejections", cause="connect")
        for _ in range(8):
            assert (await ask(one))[2] == "good"
        assert counted("retries", cause="connect") == before[0] + 3
        assert counted("ejections", cause="connect") == before[1] + 1
        assert await ejections(one) == ["connect", None]
        await until(lambda: counted("probes", result="failed"), "a probe that failed")
        back = ByteEngine("bad", healthy)
        async with back.serving(port):
            await until(lambda: bool(paths), "a probe that is answered")
            await until(lambda: _none_out(one), "back")
            assert back.bodies == [b""]  # the probe, no user's request
            back.answer = saying(
                CHUNKED + b"".join(chunk(part) for part in (*CHUNKS, *LAST_CHUNKS)) + b"0\r\n\r\n"
            )
            assert await ask(one) == (200, WHOLE, "bad")
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


async def _none_out(one: Edge) -> bool:
    return await ejections(one) == [None, None]


async def test_the_last_instances_are_never_left_out(redis_client, redis_socket) -> None:
    """Where all fail, half of them are asked all the same, and the client hears why."""
    engines = [ByteEngine(name, saying()) for name in "ab"]
    async with edge(
        redis_client, redis_socket, *engines, ejection_failures_min=1, retries_max=0
    ) as one:
        for _ in range(4):
            assert (await ask(one))[0] == 502
        assert sum(len(engine.bodies) for engine in engines) == 4
        assert await ejections(one) == ["reset", "reset"]
        for engine in engines:
            engine.answer = saying(CHUNKED + chunk(WHOLE) + b"0\r\n\r\n")
        assert (await ask(one))[:2] == (200, WHOLE)
        assert None in await ejections(one)  # who served a request is back at once
