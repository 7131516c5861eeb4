"""The load generator against a real local server: good streams, and everything that goes wrong."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from loadgen.arrivals import constant
from loadgen.client import Target, first_model
from loadgen.errors import EndpointError
from loadgen.records import RequestRecord, read_run
from loadgen.replay import Progress, replay
from loadgen.trace import TraceRow, write_trace

pytestmark = pytest.mark.integration

DEADLINE_S = 20
ROOT = Path(__file__).parents[2]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Timestable-Instance: engine-a\r\n"
DECISION = b'X-Timestable-Decision: {"policy":"lmetric","hit_tokens":16}\r\n'
DONE = b"data: [DONE]\n\n"

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def chunk(payload: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def token(text: str = "x") -> bytes:
    """One token event as an HTTP chunk."""
    return chunk(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
    """The last event but one."""
    told = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"


def plain(status: bytes, body: bytes) -> bytes:
    """A whole answer of a known length."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def whole_stream(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    """What an engine does: max_tokens tokens, usage, [DONE]."""
    prompt = body["prompt"]
    count = body["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(count, int)
    writer.write(HEAD + DECISION + b"\r\n")
    for _ in range(count):
        writer.write(token())
        await writer.drain()
    writer.write(chunk(usage(len(prompt), count, 16) + DONE) + b"0\r\n\r\n")


class Server:
    """Answers every POST as told; keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = whole_stream
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.connections_count = 0
        self.arrived = asyncio.Condition()
        self.closing = asyncio.Event()
        self.url = ""

    async def wait_for_requests(self, count: int) -> None:
        """Until so many requests have arrived."""
        async with asyncio.timeout(DEADLINE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)

    async def silence(self, _body: dict[str, object], _writer: asyncio.StreamWriter) -> None:
        """The answer that never comes."""
        await self.closing.wait()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections_count += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                async with self.arrived:
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.arrived.notify_all()
                await self.answer(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a free port."""
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield server
    server.closing.set()
    listener.close()


def make_rows(count: int = 1, **changes: object) -> list[TraceRow]:
    """Rows of one block of 16 tokens with 3 tokens to answer."""
    values: dict[str, object] = {
        "arrival_s": 0.0,
        "prompt_tokens": 16,
        "output_tokens": 3,
        "block_size_tokens": 16,
    }
    return [TraceRow(**{**values, "block_ids": (index,), **changes}) for index in range(count)]


async def run_one(server: Server, **target: object) -> RequestRecord:
    """The record of a single request."""
    values: dict[str, object] = {"url": server.url, "model": "m", **target}
    async with asyncio.timeout(DEADLINE_S):
        result = await replay(make_rows(), (0.0,), Target(**values))
    return result.records[0]


async def test_good_stream_is_recorded_whole(server: Server) -> None:
    """Times in order, usage, headers of the router, and no error."""
    record = await run_one(server)
    assert (
        record.error,
        record.status,
        record.prompt_tokens,
        record.output_tokens,
        record.cached_tokens,
    ) == (None, 200, 16, 3, 16)
    assert (
        record.instance,
        record.decision,
    ) == ("engine-a", {"policy": "lmetric", "hit_tokens": 16})
    assert len(record.token_times_s) == 3
    times_s = [record.scheduled_s, record.sent_s, *record.token_times_s, record.finished_s]
    assert times_s == sorted(times_s)
    assert record.first_token_s == record.token_times_s[0]


async def test_request_id_is_ours_and_headers_go_along(server: Server) -> None:
    """The id in the record is the one the server got."""
    record = await run_one(server, headers={"x-timestable-policy": "round_robin"}, api_key="k")
    head = server.heads[0].lower()
    assert f"x-request-id: {record.request_id}\r\n" in head
    assert "x-timestable-policy: round_robin\r\n" in head
    assert "authorization: bearer k\r\n" in head


async def test_connections_are_reused(server: Server) -> None:
    """Requests one after the other share a connection."""
    rows = make_rows(3)
    await replay(rows, (0.0, 0.0, 0.0), Target(url=server.url, model="m"), in_flight_max=1)
    assert (len(server.bodies), server.connections_count) == (3, 1)


async def test_in_flight_bound_holds(server: Server) -> None:
    """No more requests at once than allowed; the wait shows as schedule lag, nothing is lost."""
    now = most = 0

    async def slow(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        await whole_stream(body, writer)

    server.answer = slow
    target = Target(url=server.url, model="m")
    result = await replay(make_rows(8), constant(8, request_rate=1e6), target, in_flight_max=2)
    assert most == 2
    assert {None} == {record.error for record in result.records}
    last = max(r.sent_s - r.scheduled_s for r in result.records if r.sent_s is not None)
    assert last > 0.04


async def test_open_loop_sends_on_time_whatever_the_server_does(server: Server) -> None:
    """A server that answers nothing delays no send."""
    server.answer = server.silence
    target = Target(url=server.url, model="m", request_timeout_s=0.5)
    result = await replay(make_rows(5), constant(5, request_rate=50.0), target)
    assert {"timeout: no end of the answer within 0.5 s"} == {r.error for r in result.records}
    assert all(r.sent_s is not None and r.sent_s - r.scheduled_s < 0.4 for r in result.records)


async def test_follow_up_waits_for_the_answer_before_it(server: Server) -> None:
    """Closed loop within a session: due when answered, so waiting is no schedule lag."""
    rows = make_rows(2, session_id="s")
    target = Target(url=server.url, model="m")
    result = await replay(rows, (0.0, 0.0), target, wait_for_previous_turn=True)
    first, second = result.records
    assert first.finished_s is not None
    assert second.scheduled_s >= first.finished_s


@pytest.mark.parametrize(
    ("answer", "error", "tokens_count"),
    [
        (
            plain(b"503 No", b'{"error":{"message":"no instance"}}'),
            "http 503: no instance",
            0,
        ),
        (plain(b"500 Oops", b"<xml>"), "http 500: <xml>", 0),
        (plain(b"502 Bad", b""), "http 502: (empty body)", 0),
        (HEAD + b"\r\n" + token(), "disconnected: ", 1),
        (b"", "disconnected: ", 0),
        (b"HTTP/1.1 200 OK\r\n", "disconnected: ", 0),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "bad answer: not an HTTP/1.1 answer", 0),
        (HEAD + b"\r\nzz\r\n", "bad answer: bad chunk size", 0),
        (HEAD + b"\r\n" + token() + b"0\r\n\r\n", "malformed: the stream ended without", 1),
        (HEAD + b"\r\n" + chunk(b"data: hello\n\n"), "malformed: event is not JSON", 0),
        (
            HEAD
            + b"\r\n"
            + token()
            + chunk(b'data: {"error":{"message":"died"}}\n\n')
            + b"0\r\n\r\n",
            "stream: died",
            1,
        ),
        (plain(b"200 OK", b"{}"), "malformed: the stream ended", 0),
    ],
)
async def test_what_goes_wrong_is_recorded(
    server: Server, answer: bytes, error: str, tokens_count: int
) -> None:
    """Every failure has its kind; the tokens that came before it are kept; nothing is raised."""

    async def send(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        raise ConnectionError

    server.answer = send
    record = await run_one(server)
    assert record.error is not None
    assert record.error.startswith(error)
    assert tokens_count == len(record.token_times_s)
    assert record.finished_s is not None


async def test_stream_that_stalls_meets_the_deadline(server: Server) -> None:
    """Tokens so far are kept and the connection is closed, which tells the engine to stop."""
    closed = asyncio.Event()

    async def stall(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + token() + token())
        while True:  # comments, which keep the connection alive and are no tokens
            writer.write(chunk(b": ping\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def notice(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        try:
            await stall(body, writer)
        finally:
            closed.set()

    server.answer = notice
    record = await run_one(server, request_timeout_s=0.3)
    assert record.error == "timeout: no end of the answer within 0.3 s"
    assert len(record.token_times_s) == 2
    async with asyncio.timeout(DEADLINE_S):
        await closed.wait()


async def test_refused_connection_is_recorded(server: Server) -> None:
    """Nobody listens there."""
    listener = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    record = await run_one(server, url=f"http://127.0.0.1:{port}")
    assert record.error is not None
    assert record.error.startswith("connect: ")
    assert (record.status, record.first_token_s) == (None, None)


async def test_failure_of_one_is_no_failure_of_others(server: Server) -> None:
    """A connection that breaks takes only its own request with it."""

    async def break_odd(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) % 2:
            raise ConnectionError
        await whole_stream(body, writer)

    server.answer = break_odd
    target = Target(url=server.url, model="m")
    result = await replay(make_rows(6), (0.0,) * 6, target, in_flight_max=1)
    errors = [record.error is None for record in result.records]
    assert errors == [False, True] * 3


async def test_progress_ends_with_everything_finished(server: Server) -> None:
    """The last call says so."""
    seen: list[Progress] = []
    target = Target(url=server.url, model="m")
    await replay(make_rows(4), (0.0,) * 4, target, on_progress=seen.append)
    assert (
        seen[-1].total_count,
        seen[-1].sent_count,
        seen[-1].finished_count,
        seen[-1].errors_count,
        seen[-1].in_flight_count,
    ) == (4, 4, 4, 0, 0)


async def test_cancelling_a_replay_closes_its_connections(server: Server) -> None:
    """No request outlives the one who asked for it."""
    server.answer = server.silence
    target = Target(url=server.url, model="m")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(replay(make_rows(2), (0.0, 0.0), target))
        await server.wait_for_requests(2)
        task.cancel()
    assert task.cancelled()


async def first_model_of(server: Server, answer: bytes) -> str:
    """What is made of this answer to `/v1/models`."""

    async def models(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    server.answer = models
    return await first_model(server.url)


async def test_first_model_is_asked_for(server: Server) -> None:
    """`/v1/models` names it."""
    body = b'{"data":[{"id":"qwen"},{"id":"other"}]}'
    assert await first_model_of(server, plain(b"200 OK", body)) == "qwen"
    assert server.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")


@pytest.mark.parametrize("body", [b'{"data":[]}', b"<html>", b"[]", b'{"error":"key?"}'])
async def test_url_without_a_model_says_what_to_give(server: Server, body: bytes) -> None:
    """The answer is quoted and the option named."""
    with pytest.raises(EndpointError, match=r"names no model \(status 404.*--model"):
        await first_model_of(server, plain(b"404 Not Found", body))


async def interrupted_run(
    server: Server, directory: Path, signal_number: signal.Signals
) -> tuple[int | None, str, Path]:
    """Exit status, output and record file of a command stopped after two requests arrived."""
    rows = [
        TraceRow(
            arrival_s=arrival_s,
            prompt_tokens=16,
            output_tokens=3,
            block_ids=(index,),
            block_size_tokens=16,
        )
        for index, arrival_s in enumerate((0.0, 0.1, 600.0))
    ]
    write_trace(directory / "t.jsonl", rows)
    records = directory / "r.jsonl.gz"
    arguments = ["--trace", str(directory / "t.jsonl"), "--url", server.url, "--model", "m"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadgen", "replay", *arguments, "--out", str(records)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        await server.wait_for_requests(2)
        process.send_signal(signal_number)
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(), records


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_interruption_keeps_what_was_measured(
    server: Server, tmp_path: Path, signal_number: signal.Signals
) -> None:
    """Ctrl-C: the answered request and the one in flight are saved, it says so, status 130."""

    async def answer_the_first(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) > 1:
            await server.closing.wait()
        await whole_stream(body, writer)

    server.answer = answer_the_first
    status, output, records = await interrupted_run(server, tmp_path, signal_number)
    assert status == 130, output
    assert "interrupted: 2 of 3 requests are recorded" in output
    assert [record.error for record in read_run(records).records] == [None, "interrupted"]


async def test_command_measures_reports_and_succeeds(server: Server, tmp_path: Path) -> None:
    """The whole command: table on the screen, records, JSON and HTML as files, status 0."""
    write_trace(tmp_path / "t.jsonl", make_rows(4))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadgen", "replay", "--trace", str(tmp_path / "t.jsonl")),
        *("--url", server.url, "--model", "m", "--arrivals", "constant", "--request-rate", "100"),
        *("--out", str(tmp_path / "r.jsonl"), "--name", "mine"),
        *("--json", str(tmp_path / "f.json"), "--html", str(tmp_path / "r.html")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "TTFT mean (ms)" in output.decode()
    assert json.loads((tmp_path / "f.json").read_text())["runs"]["mine"]["hit_ratio_actual"] == 1.0
    assert "<title>mine</title>" in (tmp_path / "r.html").read_text()
    assert len(read_run(tmp_path / "r.jsonl").records) == 4
