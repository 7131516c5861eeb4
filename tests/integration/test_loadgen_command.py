"""`python -m loadgen replay` as a person runs it, to the end or interrupted."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from completion_server import DEADLINE_S, Server, make_rows, serving, whole_stream

from loadgen.records import read_run
from loadgen.trace import TraceRow, write_trace

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a free port."""
    async with serving() as server:
        yield server


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
        *("--url", server.url, "--model", "m", "--arrivals", "constant", "--request_rate", "100"),
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
