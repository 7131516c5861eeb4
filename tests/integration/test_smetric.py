"""SMetric over real sockets: the cost of prefill is fitted, turns are seen, sessions stay."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sidecar_run import Probe
from sidecar_run import running as sidecar
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until_equal

from router.composition import composed
from router.config import RouterConfig
from router.prefill_fit import OBSERVATIONS_MIN, WINDOW
from workers.simulated.cost_model import load_profile

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

DEADLINE_S = 50.0
ENGINES, SPEEDUP = 2, 4.0
PROFILE = "h20-qwen3-30b-a3b"
STAYS, BEGINS = "stays", "begins or moves"
SIZES = (8_000, 500, 3_000, 6_000)
"""Of prompts, by turns: attention is an eighth of the work of the longest."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a sidecar needs of an engine."""

    url: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """A router that decides by SMetric, its engines, and a client."""

    client: aiohttp.ClientSession
    engines: list[Live]

    async def view(self) -> dict[str, Any]:
        """The one fleet of `/fleet`; empty when there is none."""
        async with self.client.get("/fleet") as answer:
            fleets = (await answer.json())["fleets"]
        return dict(fleets[0]) if fleets else {}

    async def eligible(self) -> int:
        """How many engines take requests."""
        return sum(one["eligible"] for one in (await self.view()).get("instances", ()))

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[str, str]:
        """A request: who answered, and what."""
        body = {"model": "m", "max_tokens": 2, "ignore_eos": True} | body
        async with self.client.post(path, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return answer.headers["x-timestable-instance"], text

    async def decided(self, body: dict[str, Any], turn: str = "") -> tuple[str, str]:
        """Where a request would go now, and by which of both rules."""
        headers = {"x-timestable-turn": turn} if turn else {}
        async with self.client.post("/route", json={"model": "m"} | body, headers=headers) as told:
            decision = await told.json()
        beyond = decision["score"] - (decision["prompt_tokens"] - decision["hit_tokens"])
        return str(decision["instance"]), STAYS if 0 < beyond < 1 else BEGINS


@pytest.fixture
async def fleet(redis_socket: Path, probe: Probe) -> AsyncIterator[Fleet]:
    """Two engines whose time runs SPEEDUP times as fast."""
    del probe  # it begins with an empty Redis
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0, policy="smetric")
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(ENGINES):
            live = simulated(model_name="m", deadline_s=DEADLINE_S, speedup=SPEEDUP)
            engines.append(await stack.enter_async_context(live))
            await stack.enter_async_context(sidecar(Address(engines[-1].url), redis_socket))
        router = await stack.enter_async_context(composed(config))
        url = f"http://127.0.0.1:{router.listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        fleet = Fleet(client, engines)
        await until_equal(ENGINES, fleet.eligible)
        yield fleet


async def test_what_prefill_costs_is_learned_from_first_bytes(fleet: Fleet) -> None:
    """After enough streams `/fleet` says what a prompt takes, as the engine's own model has it.

    On a busy machine some say nothing (sent while another was believed to be queued) or too much.
    """
    assert (await fleet.view())["prefill_cost"] is None
    cost = load_profile(PROFILE).cost
    sizes = (2_000, 8_000)
    expected = [
        (n * cost.linear_s_per_token + n * n / 2 * cost.attention_s_per_pair) / SPEEDUP
        for n in sizes
    ]
    learned: list[float] = []
    for number in range(WINDOW):
        size = SIZES[number % len(SIZES)]
        prompt = [number + 1] * size
        await fleet.ask("/v1/completions", {"prompt": prompt, "stream": True})
        told = (await fleet.view())["prefill_cost"]
        assert told is None or told["prefills"] >= OBSERVATIONS_MIN
        if told is None:
            continue
        learned = [
            n * told["linear_s_per_token"] + n * n / 2 * told["attention_s_per_pair"] for n in sizes
        ]
        if learned == pytest.approx(expected, rel=0.4):
            break
    assert learned == pytest.approx(expected, rel=0.4)


async def test_a_conversation_stays_and_begins_anew_when_it_was_compacted(fleet: Fleet) -> None:
    """Its second turn goes to its holder; once its history was rewritten, it is a first turn."""
    opening = {"role": "user", "content": "Tell me about trains and tables. " * 60}
    asking = {"role": "user", "content": "And then?"}
    assert (await fleet.decided({"messages": [opening]}))[1] == BEGINS
    holder, text = await fleet.ask("/v1/chat/completions", {"messages": [opening]})
    said = {"role": "assistant", "content": json.loads(text)["choices"][0]["message"]["content"]}
    talk = {"messages": [opening, said, asking]}
    await until_equal((holder, STAYS), lambda: fleet.decided(talk))
    assert (await fleet.ask("/v1/chat/completions", talk))[0] == holder

    summary = {"role": "user", "content": "What was said: trains, tables. " * 60}
    assert (await fleet.decided({"messages": [summary, said, asking]}))[1] == BEGINS


async def test_a_plain_completion_says_its_turn(fleet: Fleet) -> None:
    """By a header; without it the same prompt is a first turn."""
    prompt = [7] * 640
    holder, _ = await fleet.ask("/v1/completions", {"prompt": prompt})
    follow_up = {"prompt": [*prompt, *[8] * 100]}
    await until_equal((holder, STAYS), lambda: fleet.decided(follow_up, turn="1"))
    assert await fleet.decided(follow_up) == (holder, BEGINS)
