"""What the load generator costs: CPU per streamed chunk and per request, and per prompt body.

Run as a program this file is the server it measures against.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from loadgen.client import StreamingClient, Target
from loadgen.records import RequestRecord
from loadgen.replay import replay
from loadgen.trace import TraceRow

pytestmark = [pytest.mark.integration, pytest.mark.benchmark]

ROOT = Path(__file__).parents[2]
STREAMS_COUNT = 100
TOKEN_INTERVAL_S = 0.02
PROMPT_TOKENS = 12 * 512
EVENT = (
    b'data: {"id":"cmpl-8a7f6d5c4b3a29181716","object":"text_completion","created":1760000000,'
    b'"model":"m","choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def serve() -> None:
    """Print the port, then answer every request with the tokens it asks for, evenly spaced."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        count = int(body.split(b'"max_tokens": ')[1].split(b",")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(count):
            writer.write(CHUNK)
            await asyncio.sleep(TOKEN_INTERVAL_S)
        writer.write(END)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # tells the test
    await server.serve_forever()


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a server in a process of its own, so that its CPU time is not counted."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()


def rows(output_tokens: int) -> list[TraceRow]:
    """Requests with prompts of their own."""
    return [
        TraceRow(
            arrival_s=0.0,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
            block_ids=tuple(range(12 * index, 12 * index + 12)),
        )
        for index in range(STREAMS_COUNT)
    ]


def cpu_s(port: int, output_tokens: int) -> tuple[float, tuple[RequestRecord, ...]]:
    """CPU seconds of this process for one run, kernel included."""
    schedule = tuple(index * 0.005 for index in range(STREAMS_COUNT))
    target = Target(url=f"http://127.0.0.1:{port}", model="m")
    started_s = time.process_time()
    result = uvloop.run(replay(rows(output_tokens), schedule, target))
    return time.process_time() - started_s, result.records


def test_cost_per_chunk_and_per_request(port: int) -> None:
    """Two runs that differ only in the tokens per answer tell the two costs apart."""
    few_s, _ = cpu_s(port, 1)
    many_s, records = cpu_s(port, 301)
    chunk_us = (many_s - few_s) / (300 * STREAMS_COUNT) * 1e6
    request_us = few_s / STREAMS_COUNT * 1e6 - chunk_us
    print(f"{chunk_us:.1f} us per chunk, {request_us:.0f} us per request")
    assert {(None, 301)} == {(record.error, len(record.token_times_s)) for record in records}


def test_cost_of_a_prompt_body() -> None:
    """A prompt of 12,288 tokens in 512-token blocks never seen before."""
    client = StreamingClient(Target(url="http://127.0.0.1:1", model="m"))
    started_s = time.process_time()
    for first in range(100):
        row = TraceRow(
            arrival_s=0.0,
            prompt_tokens=24 * 512,
            output_tokens=1,
            block_ids=tuple(range(24 * first, 24 * first + 24)),
        )
        call = client.prepare(row, row_index=first, scheduled_s=0.0)
    took_s = time.process_time() - started_s
    print(f"{took_s / 100 * 1e3:.2f} ms per prompt body")
    assert len(call.body) > 24 * 512 * 2


if __name__ == "__main__":
    uvloop.run(serve())
