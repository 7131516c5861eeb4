"""An engine as the sidecar sees it: vLLM's HTTP answers and its event sockets, driven by a test."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

END_OF_REPLAY = b"\xff" * 8


def stored(
    hashes: Sequence[int],
    tokens: Sequence[int],
    *,
    parent: int | None = None,
    block_size: int = 16,
    **fields: object,
) -> dict[str, object]:
    """A BlockStored event as vLLM 0.32 encodes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **fields,
    }


def removed(hashes: Sequence[int]) -> dict[str, object]:
    """A BlockRemoved event as vLLM 0.32 encodes it."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


class EventPublisher:
    """PUB and ROUTER of one data-parallel rank, as vLLM's ZmqEventPublisher."""

    def __init__(
        self,
        *,
        rank: int = 0,
        has_replay: bool = True,
        ring_batches: int = 10_000,
        replay_frames: int = 4,
        topic: str = "kv",
        connect_to: str | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._rank = rank
        self._topic = topic.encode()
        self._replay_frames = replay_frames
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if has_replay else None
        live_port, replay_port = ports or (0, 0)
        if connect_to is None:
            self.port = _bind(self._pub, live_port)
        else:
            self._pub.connect(connect_to)
        self.replay_port = _bind(self._router, replay_port) if self._router else None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_batches)
        self.sequence = 0
        self.replays_count = 0
        self.answers_replays = True

    async def publish(self, *events: object, ts_s: float = 1.5, skip_live: bool = False) -> None:
        """Send one batch; skip_live keeps it for replays only, as if the network had lost it."""
        payload = msgpack.packb([ts_s, list(events), self._rank])
        await self.publish_raw(payload, skip_live=skip_live)

    async def publish_raw(self, payload: bytes, *, skip_live: bool = False) -> None:
        """Send any payload."""
        sequence = self.sequence.to_bytes(8, "big")
        self._ring.append((self.sequence, payload))
        self.sequence += 1
        if not skip_live:
            await self._pub.send_multipart([self._topic, sequence, payload])

    async def serve_replays(self) -> None:
        """Answer replays until cancelled."""
        while self._router is not None:
            client, _, start = await self._router.recv_multipart()
            self.replays_count += 1
            if not self.answers_replays:
                continue
            for sequence, payload in list(self._ring):
                if sequence >= int.from_bytes(start, "big"):
                    await self._reply(client, sequence.to_bytes(8, "big"), payload, self._topic)
            await self._reply(client, END_OF_REPLAY, b"", b"")

    async def _reply(self, client: bytes, sequence: bytes, payload: bytes, topic: bytes) -> None:
        assert self._router is not None
        topics = [topic] if self._replay_frames == 4 else []
        await self._router.send_multipart([client, b"", *topics, sequence, payload])

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    return int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2])


ANSWERED = (
    "/v1/chat/completions",
    *("/v1/rerank", "/score", "/generative_scoring", "/cohere/v2/chat"),
    *("/classify", "/pooling", "/v2/embed"),
)
"""Paths, all with the same answer."""


@dataclass
class EngineStandIn:
    """HTTP side and publishers; async context manager. Set fields to change its answers."""

    publishers: list[EventPublisher] = field(default_factory=lambda: [EventPublisher()])
    models: Sequence[Mapping[str, Any]] = ({"id": "m", "root": "r", "max_model_len": 4096},)
    block_size_tokens: int = 16
    capacity_blocks: int = 1000
    running_count: int = 0
    waiting_count: int = 0
    sleep_states: Mapping[str, int] | None = None
    status: int = 200
    tells_sources: bool = True
    url: str = ""
    port: int = 0
    asked: list[bytes] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        app = web.Application()
        for path in ANSWERED:
            app.router.add_post(path, self._answer)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_get("/kv_event_sources", self._sources)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        serving = [tasks.create_task(p.serve_replays()) for p in self.publishers]
        self._stack.callback(lambda: [task.cancel() for task in serving])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()
        for publisher in self.publishers:
            publisher.close()

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.read())
        details = {"cached_tokens": 0}
        usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": details}
        return web.json_response({"choices": [], "usage": usage}, status=self.status)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self.models)}, status=self.status)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _sources(self, _: web.Request) -> web.Response:
        if not self.tells_sources:
            return web.Response(status=404)
        return web.json_response(
            {
                str(rank): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://*:{p.port}",
                    "replay_endpoint": p.replay_port and f"tcp://*:{p.replay_port}",
                    "topic": "kv",
                }
                for rank, p in enumerate(self.publishers)
            }
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = []
        for rank in range(len(self.publishers)):
            labels = f'engine="{rank}",model_name="m"'
            shape = f'block_size="{self.block_size_tokens}",num_gpu_blocks="{self.capacity_blocks}"'
            lines += [
                f"vllm:num_requests_running{{{labels}}} {self.running_count}.0",
                f"vllm:num_requests_waiting{{{labels}}} {self.waiting_count}.0",
                f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
                f"vllm:cache_config_info{{{shape},{labels}}} 1.0",
            ]
            lines += [
                f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {value}.0'
                for state, value in (self.sleep_states or {}).items()
            ]
        return web.Response(text="\n".join(sorted(lines)) + "\n", status=self.status)
