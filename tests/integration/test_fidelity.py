"""What an engine and a client see of each other through the router, byte for byte."""

import asyncio
import gzip
import json

import pytest
from fleets import until
from raw_engine import RawEngine, connection, exchange, headers_of, post, read_message
from router_edge import edge

pytestmark = pytest.mark.integration

BODY = b'{ "model":"m",  "prompt": [1,2,3], "x": 1.50, "\\u0078": "\xc3\xa9" }\n'


async def test_a_request_reaches_the_engine_as_it_was_sent(redis_client, redis_socket) -> None:
    """Path and query as they were written, headers with their case, order and repetition, body.

    What concerns the client's connection alone stays here, with what `Connection` names; nothing
    is added but the request id.
    """
    engine = RawEngine("a")
    lines = (
        "X-One: 1",
        "authorization: Bearer k",
        "Authorization: Bearer l",
        "x-one: 2",
        "Connection: keep-alive, X-Hop",
        "X-Hop: 1",
        "Keep-Alive: timeout=9",
        "TE: trailers",
        "Upgrade: h2c",
        "Proxy-Authorization: p",
        "Cookie: a=b; c=d",
        "X-Request-Id: r-1",
        "X-Latin: \xe9",
    )
    target = "/v1/completions?a=%2F+%c3%a9&a=b%20c&&=;x"
    async with edge(redis_client, redis_socket, engine) as one:
        head, body = await exchange(one.process.listeners.port, post(target, BODY, *lines))
    assert (head.split(b"\r\n", 1)[0], body) == (b"HTTP/1.1 200 OK", b"{}")
    [(seen, seen_body)] = engine.requests
    assert seen.split(b"\r\n", 1)[0] == f"POST {target} HTTP/1.1".encode()
    assert seen_body == BODY
    assert b"X-Latin: \xe9\r\n" in seen
    headers = [pair for pair in headers_of(seen) if pair[0] != "X-Latin"]
    host = engine.url.removeprefix("http://")
    assert sorted(headers) == sorted(
        [
            ("X-One", "1"),
            ("Authorization", "Bearer k"),
            ("Authorization", "Bearer l"),
            ("x-one", "2"),
            ("Cookie", "a=b; c=d"),
            ("x-request-id", "r-1"),
            ("Host", host),
            ("Content-Length", str(len(BODY))),
        ]
    )
    ones = [value for name, value in headers if name.lower() == "x-one"]
    assert ones == ["1", "2"]


async def test_an_answer_reaches_the_client_as_it_was_sent(redis_client, redis_socket) -> None:
    """Status, headers with their repetition, and the body; hop-by-hop headers stay here."""
    answer = (
        b"HTTP/1.1 418 I'm a Teapot\r\nServer: uvicorn\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
        b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nx-engine: \xe9\r\n"
        b"Content-Type: application/json\r\n"
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b'Content-Length: 14\r\n\r\n{"error": "x"}'
    )
    engine = RawEngine("a", pieces=[answer])
    async with edge(redis_client, redis_socket, engine) as one:
        head, body = await exchange(one.process.listeners.port, post("/v1/completions", BODY))
    assert head.startswith(b"HTTP/1.1 418 ")
    assert body == b'{"error": "x"}'
    assert b"\r\nx-engine: \xc3\xa9\r\n" in head  # as UTF-8, the one thing that is written anew
    headers = headers_of(head)
    ours = {"x-request-id", "x-timestable-instance"}
    assert [pair for pair in headers if pair[0] not in {*ours, "x-engine"}] == [
        ("Server", "uvicorn"),
        ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Content-Type", "application/json"),
        ("Content-Length", "14"),
    ]
    assert ours <= {name for name, _ in headers}


async def test_pieces_of_a_stream_go_on_as_they_come(redis_client, redis_socket) -> None:
    """Each piece is passed on before the next one is there, in a frame of its own, unchanged."""
    pieces = [b'data: {"a":1}\n\n', b"data: hal", b"f\r\n\r\n: ping\n\n", b"data: [DONE]\n\n"]
    frames = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    start = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    engine = RawEngine("a", pieces=[start + frames[0], *frames[1:], b"0\r\n\r\n"])
    body = b'{"model":"m","prompt":[1],"stream":true}'
    async with (
        edge(redis_client, redis_socket, engine) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(post("/v1/completions", body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Type: text/event-stream\r\n" in head
        for frame in frames:
            assert await reader.readexactly(len(frame)) == frame
            engine.between.release()
        assert await reader.readexactly(5) == b"0\r\n\r\n"


async def test_a_body_in_chunks_arrives_whole(redis_client, redis_socket) -> None:
    """A client need not tell a length, and may ask first whether to send at all."""
    engine = RawEngine("a")
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    async with (
        edge(redis_client, redis_socket, engine) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:]))
        answer, _ = await read_message(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")
    [(seen, body)] = engine.requests
    assert (body, b"xpect" in seen, b"hunked" in seen) == (BODY, False, False)


async def test_a_connection_serves_one_request_after_the_other(redis_client, redis_socket) -> None:
    """Also behind a refused one, and when the next is sent before the answer is read."""
    engine = RawEngine("a")
    good, bad = post("/v1/completions", BODY), post("/v1/completions", b'{"model": 5}')
    async with (
        edge(redis_client, redis_socket, engine) as one,
        connection(one.process.listeners.port) as (reader, writer),
    ):
        writer.write(good + bad + good)
        answers = [await read_message(reader) for _ in range(3)]
    assert [head.split(b" ", 2)[1] for head, _ in answers] == [b"200", b"400", b"200"]
    assert json.loads(answers[1][1])["error"]["param"] == "model"
    assert len(engine.requests) == 2


async def test_more_than_a_hundred_requests_reach_one_engine_at_once(
    redis_client, redis_socket
) -> None:
    """No library's limit of connections holds requests back that were admitted."""
    engine = RawEngine("a")
    engine.let_go.clear()
    async with edge(redis_client, redis_socket, engine) as one:
        port = one.process.listeners.port
        async with asyncio.TaskGroup() as tasks:
            sent = post("/v1/completions", BODY)
            asking = [tasks.create_task(exchange(port, sent)) for _ in range(104)]
            await until(lambda: len(engine.requests) == 104, "all requests at the engine")
            engine.let_go.set()
    answers = [task.result() for task in asking]
    assert {head.split(b" ", 2)[1] for head, _ in answers} == {b"200"}


async def test_the_engines_answer_to_an_unknown_path_is_the_clients(
    redis_client, redis_socket
) -> None:
    """Paths under /v1/ that nobody here knows go to the model they name, whatever the method."""
    engine = RawEngine("a", pieces=[b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope"])
    async with edge(redis_client, redis_socket, engine) as one:
        port = one.process.listeners.port
        for sent in (
            post("/v1/new/thing?x=1", b'{"model":"m"}'),
            post("/v1/new/thing", b"\x1f\x8b not json", "Content-Encoding: gzip"),
            b"GET /v1/files HTTP/1.1\r\nHost: r\r\n\r\n",
            b"DELETE /v1/files/1 HTTP/1.1\r\nHost: r\r\n\r\n",
        ):
            head, body = await exchange(port, sent)
            assert (head.split(b" ", 2)[1], body) == (b"404", b"nope")
            assert b"x-timestable-instance: a\r\n" in head
    lines = [head.split(b" HTTP", 1)[0] for head, _ in engine.requests]
    assert lines == [
        b"POST /v1/new/thing?x=1",
        b"POST /v1/new/thing",
        b"GET /v1/files",
        b"DELETE /v1/files/1",
    ]
    assert engine.requests[1][1] == b"\x1f\x8b not json"
    assert b"ontent-" not in engine.requests[2][0]


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"GET /v1/completions HTTP/1.1\r\nHost: r\r\n\r\n", b"405", "method-not-allowed"),
        (b"GET /nothing HTTP/1.1\r\nHost: r\r\n\r\n", b"404", "path-unknown"),
        (post("/v1/../sleep", b'{"model":"m"}'), b"400", "request-invalid"),
        (post("/v1/%2e%2E/sleep", b'{"model":"m"}'), b"400", "request-invalid"),
        (post("/v1/x%2f..%2f..%2fsleep", b'{"model":"m"}'), b"400", "request-invalid"),
        (post("/v1/x", b'{"model":5}'), b"400", "request-invalid"),
        (post("/v1/x", b'{"model":"z"}'), b"404", "model-unknown"),
        (post("/v1/chat/completions", b"x", "Content-Encoding: gzip"), b"400", "request-invalid"),
        (post("/v1/messages", b'{"model":"m"}'), b"400", "request-invalid"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else value,
)
async def test_what_goes_to_no_engine(
    redis_client, redis_socket, *, sent: bytes, status: bytes, reason: str
) -> None:
    """Wrong methods, paths that climb out, models that nobody serves: answered here, as JSON."""
    engine = RawEngine("a")
    async with edge(redis_client, redis_socket, engine) as one:
        head, body = await exchange(one.process.listeners.port, sent)
    assert head.split(b" ", 2)[1] == status
    assert ("x-timestable-reason", reason) in headers_of(head)
    assert json.loads(body)["error"]["message"]
    assert engine.requests == []


async def test_a_head_request_has_no_body(redis_client, redis_socket) -> None:
    """Here and at an engine; the connection goes on with the next request."""
    engine = RawEngine("a", pieces=[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"])
    async with (
        edge(redis_client, redis_socket, engine) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        for path in (b"/v1/models", b"/v1/files"):
            writer.write(b"HEAD %s HTTP/1.1\r\nHost: r\r\n\r\n" % path)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
        assert b"Content-Length: 9\r\n" in head
        writer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
        assert (await read_message(reader))[1] == b'{"status": "ok"}'


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 7", "Content-Length: 8"),
        ("Content-Length: 7", "Transfer-Encoding: chunked"),
        ("Content-Length: +7",),
        ("Transfer-Encoding: gzip",),
    ],
)
async def test_a_length_that_can_be_read_in_two_ways_reaches_no_engine(
    redis_client, redis_socket, *, lines: tuple[str, ...]
) -> None:
    """What one server takes for a body, another might take for the next client's request."""
    engine = RawEngine("a")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", "Host: r", *lines, "", ""))
    async with edge(redis_client, redis_socket, engine) as one:
        answer, body = await exchange(one.process.listeners.port, head.encode(), b"0\r\n\r\nGE")
    assert answer.split(b" ", 2)[1] == b"400"
    assert json.loads(body)["error"]["message"]
    assert engine.requests == []


async def test_a_compressed_stream_is_whole_without_a_mark_to_be_seen(
    redis_client, redis_socket
) -> None:
    """Its end is told by its framing alone, and its engine is not blamed."""
    packed = gzip.compress(b'data: {"choices":[]}\n\ndata: [DONE]\n\n')
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    framed = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    engine = RawEngine("a", pieces=[head + framed])
    async with edge(redis_client, redis_socket, engine, ejection_failures_min=1) as one:
        asked = {"model": "m", "prompt": [1, 2, 3], "stream": True}
        async with one.client.post("/v1/completions", json=asked) as answer:
            assert await answer.read() == gzip.decompress(packed)
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert instances[0]["failures_in_a_row"] == 0


async def test_a_stream_that_is_changed_has_no_length(redis_client, redis_socket) -> None:
    """Without the usage that the router asked for it is shorter than its engine told."""
    rest = b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"
    told = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'.join(rest)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    engine = RawEngine("a", pieces=[head + b"Content-Length: %d\r\n\r\n" % len(told) + told])
    async with (
        edge(redis_client, redis_socket, engine, inject_usage=True) as one,
        asyncio.timeout(5),
    ):
        asked = {"model": "m", "prompt": [1, 2, 3], "stream": True}
        async with one.client.post("/v1/completions", json=asked) as answer:
            assert await answer.read() == b"".join(rest)


async def test_a_compressed_answer_stays_compressed(redis_client, redis_socket) -> None:
    """Who asked for it can read it; here nothing is unpacked."""
    packed = gzip.compress(b'{"x": 1}')
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    engine = RawEngine("a", pieces=[head + packed])
    sent = post("/v1/completions", BODY, "Accept-Encoding: gzip")
    async with edge(redis_client, redis_socket, engine) as one:
        answer, body = await exchange(one.process.listeners.port, sent)
    assert (body, ("Content-Encoding", "gzip") in headers_of(answer)) == (packed, True)
    assert ("Accept-Encoding", "gzip") in headers_of(engine.requests[0][0])
