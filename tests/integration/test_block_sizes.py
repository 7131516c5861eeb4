"""Engines of different block sizes in one fleet: real sockets, simulated engines, one router."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from engine_stand_in import EngineStandIn
from sidecar_run import FLEET, Probe
from sidecar_run import running as sidecar
from simulated_engine import running as simulated
from waiting import until, until_equal

from indexer.contract import block_hash, fleet_functions, functions, index_functions
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from router.composition import composed
from router.config import RouterConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZES = (16, 32, 64, 128)
CONVERSATIONS = 4
TURNS = 5
ANSWER_TOKENS = 40
DEADLINE_S = 100.0


@dataclass(frozen=True, slots=True)
class Address:
    """What a sidecar needs of an engine."""

    url: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of SIZES, in this order of slots, behind a router."""

    client: aiohttp.ClientSession
    probe: Probe
    urls: list[str]
    canonical_tokens: int

    async def turn(self, prompt: list[int], policy: str) -> tuple[int, int, list[int]]:
        """Predicted and reported hit tokens of a turn, and prompt and answer together.

        Returns when the index tells of all that the engine holds of them.
        """
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS}
        async with self.client.post(
            "/v1/completions",
            json=body | {"return_token_ids": True},
            headers={"x-timestable-explain": "1", "x-timestable-policy": policy},
        ) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            decision = json.loads(response.headers["x-timestable-decision"])
        assert not decision["degraded"], decision
        whole = [*prompt, *answer["choices"][0]["token_ids"]]
        slot = self.urls.index(decision["url"])
        resident_tokens = (len(whole) - 1) // SIZES[slot] * SIZES[slot]
        expected = resident_tokens // self.canonical_tokens
        await until_equal(expected, lambda: self._depth(slot, whole))
        actual = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return decision["hit_tokens"], actual, whole

    async def _depth(self, slot: int, tokens: list[int]) -> int:
        fleet = await fleet_functions.read_fleet(self.probe.redis, FLEET)
        assert fleet is not None
        size = self.canonical_tokens
        start = block_hash.root(model_scope="m", block_size_tokens=size)
        hashes = block_hash.chain(start, block_hash.pack_tokens(tokens), size)
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        index_functions.depths(
            await functions.run(self.probe.redis, index_functions.lookup(fleet, 0, hashes)), out
        )
        return int(out[slot])


@asynccontextmanager
async def fleet_of_all_sizes(
    redis_socket: Path, probe: Probe, canonical_tokens: int
) -> AsyncIterator[Fleet]:
    """An engine and a sidecar for each size, joined in this order, and a router."""
    config = RouterConfig(
        redis_url=f"unix://{redis_socket}",
        port=0,
        index_deadline_s=10.0,
        allow_policy_override=True,
    )
    async with AsyncExitStack() as stack:
        urls = []
        for n, size in enumerate(SIZES):
            engine = simulated(
                deadline_s=DEADLINE_S,
                model_name="m",
                block_size_tokens=size,
                capacity_blocks=64_000 // size,
            )
            live = await stack.enter_async_context(engine)
            urls.append(str(live.http._base_url).rstrip("/"))
            beside = sidecar(Address(urls[-1]), redis_socket, block_size_tokens=canonical_tokens)
            await stack.enter_async_context(beside)
            await until(lambda n=n: has_joined(probe, n), "the sidecar has joined")
        router = await stack.enter_async_context(composed(config))
        await router.index.refresh()
        url = f"http://127.0.0.1:{router.listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        yield Fleet(client, probe, urls, canonical_tokens)


async def has_joined(probe: Probe, slot: int) -> bool:
    """Whether this slot is in use."""
    return slot in await probe.slots()


@pytest.mark.parametrize(("canonical_tokens", "slack_tokens"), [(16, 0), (64, 48)])
async def test_predictions_with_all_sizes_in_one_fleet(
    redis_socket: Path, probe: Probe, canonical_tokens: int, slack_tokens: int
) -> None:
    """Predicted hits are the reported ones, short by less than a coarser canonical block.

    Conversations of several turns share a beginning, wander over all engines and come back.
    """
    rng = np.random.default_rng(20261130)
    shared = rng.integers(3, 4096, 200).tolist()
    talks = [[*shared[: 200 - 23 * n]] for n in range(CONVERSATIONS)]
    seen: list[tuple[int, int]] = []
    async with fleet_of_all_sizes(redis_socket, probe, canonical_tokens) as fleet:
        for turn in range(TURNS):
            for n, talk in enumerate(talks):
                question = rng.integers(3, 4096, int(rng.integers(1, 150))).tolist()
                policy = "lmetric" if turn == TURNS - 1 else "round_robin"
                predicted, actual, talks[n] = await fleet.turn([*talk, *question], policy)
                seen.append((predicted, actual))
        for talk in talks:  # wholly resident and aligned: the last token is computed again
            for policy in ("lmetric", *["round_robin"] * len(SIZES)):
                predicted, actual, _ = await fleet.turn(talk[: len(talk) // 128 * 128], policy)
                seen.append((predicted, actual))
    wrong = [pair for pair in seen if not 0 <= pair[1] - pair[0] <= slack_tokens]
    assert not wrong
    assert sum(actual for _, actual in seen) > 2000


@pytest.mark.parametrize(("engine_tokens", "fleet_tokens"), [(24, 16), (48, 32)])
async def test_refused_size_ends_the_sidecar(
    redis_socket: Path, probe: Probe, engine_tokens: int, fleet_tokens: int
) -> None:
    """At its start, with status 1, both sizes and what to change on either side."""
    async with EngineStandIn(block_size_tokens=engine_tokens) as engine:
        args = ["--engine_url", engine.url, "--redis_url", f"unix://{redis_socket}"]
        args += ["--metrics_port", "0", "--block_size_tokens", str(fleet_tokens)]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "indexer", *args), stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                out, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
    assert child.returncode == 1
    (error,) = [
        str(line["error"])
        for line in map(json.loads, out.splitlines())
        if line["event"] == "sidecar_failed"
    ]
    assert error == (
        f"the engine's blocks of {engine_tokens} tokens do not fit the fleet's canonical blocks of "
        f"{fleet_tokens}: one must divide the other. Found the fleet with another "
        "--block_size_tokens, or give the engine another --block-size"
    )
    assert await probe.slots() == {}
