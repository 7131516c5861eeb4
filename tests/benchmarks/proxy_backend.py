"""Engines that cost nothing: canned server-sent events from bare asyncio protocols.

    python tests/benchmarks/proxy_backend.py PORT [PORT ...] EVENT_PORT

Run as a program it is one process with an engine on each port: what vLLM answers to routers and
sidecars, and its KV events on a socket (engine i: on EVENT_PORT + 2i, its replays on the
port behind). A completion answers `max_tokens` events, the first at once, then one a tick; all
streams of an engine are written in the same tick, as vLLM's steps do. Who asks for HELD_TOKENS gets
the first event and then nothing: an open stream that costs its proxy no chunks.

What an engine holds is told by the benchmark (`POST /bench/store`, JSON `{"token_ids": [...]}`): it
publishes these blocks as stored, so nothing here tokenizes. `POST /bench/tick` sets the tick in
seconds; `POST /bench/prompt` names the token ids that `/render` answers for a chat.
"""

import asyncio
import itertools
import json
import re
import sys
from pathlib import Path
from typing import cast

import uvloop

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from engine_stand_in import EventPublisher, stored  # noqa: E402 - a program finds it so

BLOCK_TOKENS = 16
MODEL_LEN_TOKENS = 131_072
HELD_TOKENS = 100_000
CHAT_NAME = re.compile(rb"chat-[0-9a-f]+-\d+-\d")
"""Every prompt of the benchmark begins with a name of its own."""

EVENT = (
    b'data: {"id":"chatcmpl-5f3c9a6e1b7d4c0f9a7e2d1c0b9a8f7e","object":"chat.completion.chunk",'
    b'"created":1796000000,"model":"sim","choices":[{"index":0,"delta":{"content":" token"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


ONE = _chunk(EVENT)
LAST = _chunk(EVENT) + _chunk(DONE) + b"0\r\n\r\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _answer(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _dechunked(body: bytes) -> tuple[bytes, bool, bytes]:
    """A chunked body, whether it is whole, and what comes behind it."""
    parts = []
    while True:
        size, end, rest = body.partition(b"\r\n")
        count = int(size, 16) if end else 0
        if not end or len(rest) < count + 2:
            return b"", False, b""
        if not count:
            return b"".join(parts), True, rest[2:]
        parts.append(rest[:count])
        body = rest[count + 2 :]


UNNAMED = _answer(json.dumps({"request_id": "r", "token_ids": [3] * 64}).encode())
"""What `/render` says of a chat that was not named: those of streams that are only open."""


class Engine:
    """One port: streams in flight, blocks told, canned answers."""

    def __init__(self, port: int, event_port: int, model_root: str) -> None:
        self.port = port
        self.publisher = EventPublisher(ports=(event_port, event_port + 1), topic="")
        self.streams: dict[asyncio.WriteTransport, int] = {}
        self.rendered: dict[bytes, bytes] = {}
        self.hashes = itertools.count(1)
        self.tick_s = 0.02
        models = [
            {"id": "sim", "object": "model", "root": model_root, "max_model_len": MODEL_LEN_TOKENS}
        ]
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{event_port}",
            "replay_endpoint": f"tcp://*:{event_port + 1}",
            "topic": "",
        }
        labels = 'engine="0",model_name="sim"'
        metrics = (
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="400000",{labels}}}'
            f" 1.0\nvllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
            f"vllm:num_requests_running{{{labels}}} 0.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        )
        info = {"model_path": model_root, "served_model_name": "sim", "model_id": "sim"}
        self.canned = {
            b"/health": _answer(b""),
            b"/health_generate": _answer(b""),
            b"/version": _answer(b'{"version": "0.32.0"}'),
            b"/v1/models": _answer(json.dumps({"object": "list", "data": models}).encode()),
            b"/kv_event_sources": _answer(json.dumps({"0": source}).encode()),
            b"/metrics": _answer(metrics.encode(), "text/plain; version=0.0.4"),
            b"/get_model_info": _answer(json.dumps(info).encode()),
            b"/model_info": _answer(json.dumps(info).encode()),
            b"/server_info": _answer(json.dumps(info).encode()),
            b"/get_server_info": _answer(json.dumps(info).encode()),
        }

    async def run(self) -> None:
        """Write a token to every stream each tick, until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self.tick_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for stream, left in list(self.streams.items()):
                if left > 1:
                    self.streams[stream] = left - 1
                    stream.write(ONE)
                else:
                    del self.streams[stream]
                    stream.write(LAST)

    async def told(self, path: bytes, body: bytes) -> None:
        """What the benchmark says."""
        said = json.loads(body)
        if path == b"/bench/tick":
            self.tick_s = float(said)
        elif path == b"/bench/prompt":
            answer = {"request_id": "r", "token_ids": said["token_ids"]}
            self.rendered[said["name"].encode()] = _answer(json.dumps(answer).encode())
        else:
            tokens = said["token_ids"]
            names = list(itertools.islice(self.hashes, len(tokens) // BLOCK_TOKENS))
            await self.publisher.publish(stored(names, tokens[: len(names) * BLOCK_TOKENS]))


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as routers speak it: one request after another."""

    def __init__(self, engine: Engine, tasks: asyncio.TaskGroup) -> None:
        self._engine = engine
        self._tasks = tasks
        self._parts: list[bytes] = []
        self._held = 0
        self._wanted = 1
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        self._engine.streams.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        while self._held >= self._wanted:
            data = b"".join(self._parts)
            head, end, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if not end:
                return self._keep(data, len(data) + 1)
            if length is None and b"chunked" in head.lower():
                body, end, rest = _dechunked(body)
                if not end:
                    return self._keep(data, len(data) + 1)
            else:
                size = int(length[1]) if length else 0
                if len(body) < size:
                    return self._keep(data, len(head) + 4 + size)
                body, rest = body[:size], body[size:]
            self._keep(rest, 1)
            if head.startswith(b"PRI "):  # somebody asks whether HTTP/2 is spoken
                return self._transport.close()
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0], body)
        return None

    def _keep(self, data: bytes, wanted: int) -> None:
        """Until there are so many bytes there is no whole request."""
        self._parts, self._held, self._wanted = [data], len(data), wanted

    def _answer(self, path: bytes, body: bytes) -> None:
        engine = self._engine
        if path.startswith(b"/bench/"):
            self._tasks.create_task(engine.told(path, body))
            self._transport.write(_answer(b""))
        elif path.endswith(b"/render"):
            name = CHAT_NAME.search(body)
            self._transport.write(engine.rendered.get(name[0] if name else b"", UNNAMED))
        elif path.endswith(b"/completions"):
            asked = re.search(rb'"max_(?:completion_)?tokens": ?(\d+)', body[-400:] + body[:400])
            asked = asked or re.search(rb'"max_(?:completion_)?tokens": ?(\d+)', body)
            count = int(asked[1]) if asked else 1
            if 1 < count < HELD_TOKENS:
                engine.streams[self._transport] = count - 1
            self._transport.write(HEAD + (ONE if count > 1 else LAST))
        else:
            missing = _answer(b"{}", status="404 Not Found")
            self._transport.write(engine.canned.get(path, missing))


async def serve(ports: list[int], event_port: int) -> None:
    """Until killed."""
    loop = asyncio.get_running_loop()
    model_root = str(Path(__file__).parents[2] / "workers" / "simulated" / "tokenizer")
    async with asyncio.TaskGroup() as tasks:
        for number, port in enumerate(ports):
            engine = Engine(port, event_port + 2 * number, model_root)
            tasks.create_task(engine.run())
            tasks.create_task(engine.publisher.serve_replays())
            await loop.create_server(
                lambda engine=engine: Connection(engine, tasks),  # type: ignore[misc]  # its default binds
                "127.0.0.1",
                port,
                backlog=2048,
            )
        print("ready", flush=True)


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:-1]], int(sys.argv[-1])))
