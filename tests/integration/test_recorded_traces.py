"""A router that records what it answers, and the analysis and the lab's reader of that file."""

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import redis.asyncio
from aiohttp import web
from prometheus_client import REGISTRY
from router_edge import PROMPT, FakeEngine, chat, completion, edge, silent, stream_all
from router_process import START_S, started
from waiting import until, until_equal

from loadgen.__main__ import main
from loadgen.trace import read_trace
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import read_rows

pytestmark = pytest.mark.integration


def _written() -> float:
    name = "timestable_router_recorded_requests_total"
    return REGISTRY.get_sample_value(name, {"result": "written"}) or 0.0


async def _refuse_three_tokens(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    if json.loads(engine.bodies[-1]).get("prompt") == [1, 2, 3]:
        return web.json_response({"error": {"message": "no"}}, status=400)
    return await stream_all(engine, request)


async def test_recorded_traffic_is_analysed_and_replayed(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """Two turns and a chat come back as rows that share what the prompts shared, and no text."""
    trace, before = tmp_path / "trace.jsonl", _written()
    follow_up = completion(prompt=[*PROMPT, *range(500, 564)])
    engine = FakeEngine("a", _refuse_three_tokens)
    async with edge(redis_client, redis_socket, engine, record_trace=str(trace)) as front:
        for body, headers in (
            (completion(), {"x-session-id": "confidential-session"}),
            (follow_up, {"x-session-id": "confidential-session"}),
            (completion(prompt=[1, 2, 3]), {}),
            (chat("a confidential question " * 20) | {"stream": True}, {}),
        ):
            kind = "chat/completions" if "messages" in body else "completions"
            async with front.client.post(f"/v1/{kind}", json=body, headers=headers) as answer:
                await answer.read()
        await until_equal(before + 3, _written)
    assert "confidential" not in trace.read_text()
    first, second, asked = read_rows([trace], ReadOptions())
    assert (first.prompt_tokens, second.prompt_tokens) == (64, 128)
    assert second.full_blocks[: len(first.full_blocks)] == first.full_blocks
    assert second.parent_id == first.request_id
    assert (second.session_id, second.turn) == (first.session_id, 1)
    assert [row.category for row in (first, asked)] == ["completions", "chat/completions"]
    assert main(["analyze", str(trace), "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["traces"]["trace"]
    assert found["sessions"] == 2
    assert found["multi_turn"]["own_session_ratio"] == 1
    assert found["ideal_hit_ratio"] == 64 / (64 + 128 + asked.prompt_tokens)


async def _ask(client: aiohttp.ClientSession, port: int, tokens: int = 64) -> int:
    """Status of a completion whose answer was read to its end."""
    body = completion(prompt=list(range(tokens)))
    async with client.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_router_has_written_all(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Every answer that was given, the one that ended while it drained too; exit code 0."""
    trace = tmp_path / "trace.jsonl"
    engine = FakeEngine("a", silent)
    options = ("--redis_url", f"unix://{redis_socket}", "--drain_notice_s", "0")
    async with (
        edge(redis_client, redis_socket, engine),
        started(*options, "--record_trace", str(trace)) as (router, ports),
        aiohttp.ClientSession() as client,
        asyncio.TaskGroup() as tasks,
    ):
        asked = [tasks.create_task(_ask(client, ports["port"])) for _ in range(5)]
        await until(lambda: len(engine.bodies) == len(asked), "the engine has all requests")
        router.send_signal(sent)
        engine.let_go.set()
        assert await asyncio.gather(*asked) == [200] * len(asked)
        async with asyncio.timeout(START_S):
            assert await router.wait() == 0
    assert len(read_trace(trace).rows) == len(asked)
    assert main(["analyze", str(trace), "--output", str(tmp_path / "out")]) == 0


async def test_after_kill_9_whole_lines_are_read_and_the_next_start_makes_a_file_of_its_own(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """What was written stays, also where it breaks off."""
    trace, second = tmp_path / "trace.jsonl", tmp_path / "trace.2.jsonl"
    options = ("--redis_url", f"unix://{redis_socket}", "--record_trace", str(trace))
    async with (
        edge(redis_client, redis_socket, FakeEngine("a", stream_all)),
        aiohttp.ClientSession() as client,
    ):
        async with started(*options) as (router, ports):
            for _ in range(3):
                assert await _ask(client, ports["port"]) == 200
            await until(lambda: _lines(trace) == 3, "three lines are written")
            router.kill()
            await router.wait()
        with trace.open("ab") as file:
            file.write(trace.read_bytes()[:50])  # as if killed amid a write
        assert len(read_trace(trace).rows) == 3
        assert main(["analyze", str(trace), "--output", str(tmp_path / "out")]) == 0
        async with started(*options) as (router, ports):
            assert await _ask(client, ports["port"]) == 200
            await until(lambda: _lines(second) == 1, "the second file has a line")
    assert len(read_trace(second).rows) == 1
    assert len(read_trace(trace).rows) == 3


async def test_a_full_disk_ends_the_recording_and_nothing_else(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """Every request is answered; the log says once why; what is there are whole lines."""
    trace = tmp_path / "trace.jsonl"
    options = ("--redis_url", f"unix://{redis_socket}", "--record_trace", str(trace))
    async with (
        edge(redis_client, redis_socket, FakeEngine("a", stream_all)),
        aiohttp.ClientSession() as client,
        started(*options) as (router, ports),
    ):
        # The kernel's own refusal, as of a full disk: no file of the router grows beyond this.
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        for _ in range(20):
            assert await _ask(client, ports["port"]) == 200
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            assert await router.wait() == 0
        assert router.stdout is not None
        said = [json.loads(line) for line in (await router.stdout.read()).splitlines()]
    ended = [line for line in said if line["event"] == "recording_ended"]
    assert [line["reason"] for line in ended] == ["failed"]
    assert trace.read_bytes().endswith(b"\n")
    assert 1 <= len(read_trace(trace).rows) < 20


async def test_a_file_that_cannot_be_made_is_said_before_anything_is_served(
    redis_socket: Path, tmp_path: Path
) -> None:
    """A line that names the option and the file, and the exit code of wrong usage."""
    trace = tmp_path / "missing" / "trace.jsonl"
    options = ("--redis_url", f"unix://{redis_socket}", "--record_trace", str(trace))
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--port", "0", *options),
        cwd=Path(__file__).parents[2],
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        _, said = await router.communicate()
    assert router.returncode == 2
    assert f"error: record_trace: {trace} cannot be made" in said.decode()
