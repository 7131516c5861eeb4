"""The share of a plain answer leaves the queue while a real engine still decodes."""

import asyncio
from typing import Any

import aiohttp
import pytest
from waiting import until, until_equal

from indexer.engine.engine_metrics import RequestTotals, parse_samples
from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts
from tests.vllm.settings import CONTEXT_TOKENS, NAME

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]

LEFT_COUNT = 5
"""Streams whose client goes after the first bytes: vLLM does not count them as ended."""


async def booked(fleet: RealFleet) -> tuple[int, int]:
    """Requests and queued prefill tokens of all instances."""
    instances = await fleet.instances()
    requests = sum(one["reserved_requests"] for one in instances)
    return requests, sum(one["reserved_prefill_tokens"] for one in instances)


async def totals(fleet: RealFleet) -> RequestTotals:
    """Of both engines together."""
    texts = [await fleet.text(f"{worker.url}/metrics") for worker in fleet.workers.values()]
    both = [parse_samples(text.encode())["0"].totals for text in texts]
    assert None not in both
    return RequestTotals(
        first_tokens_count=sum(one.first_tokens_count for one in both if one),
        ended_count=sum(one.ended_count for one in both if one),
    )


async def ask(fleet: RealFleet, body: dict[str, Any]) -> None:
    """A long answer, whole."""
    url = f"{fleet.router_urls[0]}/v1/completions"
    longest = {"model": NAME, "ignore_eos": True, "max_tokens": CONTEXT_TOKENS * 3 // 4}
    async with fleet.session.post(url, json=longest | body) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def warm_up(fleet: RealFleet) -> None:
    """Let both engines compile what log probabilities of prompts take: many seconds, once."""
    body = {"model": NAME, "prompt": Prompts(70).ids(40), "prompt_logprobs": 1, "max_tokens": 1}
    for worker in fleet.workers.values():
        async with fleet.session.post(f"{worker.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()


async def leave(fleet: RealFleet, prompts: Prompts) -> None:
    """Ask for a stream and go when it comes."""
    body = {"model": NAME, "prompt": prompts.ids(40), "stream": True, "max_tokens": 500}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.router_urls[0]}/v1/completions", json=body) as response,
    ):
        assert await response.content.readany()


@pytest.mark.parametrize("kind", ["several prompts", "no block tells"])
async def test_the_share_goes_while_it_decodes(fleet: RealFleet, kind: str) -> None:
    """By the last prompt's blocks; by the engine's counts also after clients have gone."""
    prompts = Prompts(70 + len(kind))
    body: dict[str, Any] = {"prompt": [prompts.blocks(4) for _ in range(3)]}
    if kind == "no block tells":
        body = {"prompt": prompts.blocks(4), "prompt_logprobs": 1}
        await warm_up(fleet)
        for _ in range(LEFT_COUNT):
            await leave(fleet, prompts)
    await until_equal((0, 0), lambda: booked(fleet))
    before = await totals(fleet)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask(fleet, body))

        async def has_come() -> bool:
            return (await booked(fleet))[0] == 1

        await until(has_come, "it is booked")
        await until_equal((1, 0), lambda: booked(fleet))
        given = (await totals(fleet)).first_tokens_count - before.first_tokens_count
        assert given == (3 if kind == "several prompts" else 1)
        assert not asking.done(), "it still decodes"
    await until_equal((0, 0), lambda: booked(fleet))
