"""A plain answer's prefill ends while it still decodes: simulated engine, sidecar, router, HTTP."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from sidecar_run import FLEET, Probe, metric
from sidecar_run import running as sidecar
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until, until_equal

from indexer.contract import keys
from indexer.contract.identifiers import SlotIndex
from indexer.engine.engine_metrics import parse_samples
from router.composition import composed
from router.config import RouterConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

AWAITED = keys.awaited(FLEET, SlotIndex(0))


@dataclass(frozen=True, slots=True)
class Address:
    """What a sidecar needs of an engine."""

    url: str


async def booked(probe: Probe) -> tuple[int, int]:
    """Requests and queued prefill tokens of the one instance."""
    counters = await probe.counters()
    assert counters is not None
    row = counters.slots[0]
    return int(row["reserved_requests"]), int(row["reserved_prefill_tokens"])


@pytest.mark.parametrize(
    ("engine_tokens", "prompt_tokens"), [(16, 330), (16, 320), (64, 330), (64, 50)]
)
async def test_the_share_goes_when_the_prefill_ends(
    redis_client: redis.asyncio.Redis,
    redis_socket: Path,
    probe: Probe,
    engine_tokens: int,
    prompt_tokens: int,
) -> None:
    """Queued tokens are zero while the answer is still being written; then so is everything.

    Of engines with canonical blocks and with coarser ones; also of a prompt without a full block.
    """
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0, index_deadline_s=10.0)
    async with (
        simulated(
            deadline_s=50.0, model_name="m", block_size_tokens=engine_tokens, speedup=1.0
        ) as engine,
        sidecar(
            Address(str(engine.http._base_url).rstrip("/")), redis_socket, block_size_tokens=16
        ) as registry,
    ):
        await until(lambda: has_joined(probe), "the sidecar has joined")
        async with composed(config) as router:
            await router.index.refresh()
            url = f"http://127.0.0.1:{router.listeners.port}/v1/completions"
            prompt = list(range(100, 100 + prompt_tokens))
            body = {"model": "m", "prompt": prompt, "max_tokens": 4000}
            async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(ask(client, url, body))
                await until_equal((1, 0), lambda: booked(probe))
                assert not asking.done(), "it still decodes"
                has_full_block = prompt_tokens >= engine_tokens
                await until_equal(
                    float(has_full_block), lambda: metric(registry, "prefills_ended_total")
                )
                assert not await redis_client.exists(AWAITED)
                asking.cancel()
            await until_equal((0, 0), lambda: booked(probe))


LONG = [[(first + place) % 4000 for place in range(12_000)] for first in (1, 2)]
"""Two prompts of which each takes the engine most of a second."""


@pytest.mark.parametrize(
    ("prompts", "stream"),
    [([LONG], False), ([LONG], True), ([f"{n} " + "long words " * 4_000 for n in range(4)], False)],
    ids=["several prompts", "several prompts, streamed", "unknown tokens"],
)
async def test_no_share_goes_before_its_prefill_ends(
    redis_socket: Path, probe: Probe, prompts: list[Any], stream: bool
) -> None:
    """Of several prompts when all are computed; of unknown tokens by counting, one by one.

    Never before, though the first bytes of a stream have come, and all while the answers go on.
    """
    config = RouterConfig(
        redis_url=f"unix://{redis_socket}",
        port=0,
        index_deadline_s=10.0,
        tokenizers={"m": "/nowhere"},
        tokenize_deadline_s=0.05,
    )
    first_tokens_each = len(LONG) if prompts[0] is LONG else 1
    async with (
        simulated(deadline_s=50.0, model_name="m", speedup=1.0, capacity_blocks=8000) as engine,
        sidecar(
            Address(str(engine.http._base_url).rstrip("/")), redis_socket, block_size_tokens=16
        ) as registry,
    ):
        await until(lambda: has_joined(probe), "the sidecar has joined")
        async with composed(config) as router:
            await router.index.refresh()
            url = f"http://127.0.0.1:{router.listeners.port}/v1/completions"
            body = {"model": "m", "max_tokens": 4000, "stream": stream}
            async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as tasks:
                asking = [
                    tasks.create_task(ask(client, url, {**body, "prompt": prompt}))
                    for prompt in prompts
                ]
                await until_equal(len(prompts), lambda: requests_booked(probe))
                share = (await booked(probe))[1] / len(prompts)

                async def all_have_ended() -> bool:
                    queued_shares = (await booked(probe))[1] / share
                    told = len(prompts) - queued_shares
                    assert await first_tokens(engine) >= told * first_tokens_each
                    return queued_shares == 0

                await until(all_have_ended, "no prefill tokens are queued")
                assert not any(task.done() for task in asking), "they still decode"
                # The sidecar counts when Redis has told it, which is after Redis has done it.
                await until_equal(
                    float(len(prompts)), lambda: metric(registry, "prefills_ended_total")
                )
                for task in asking:
                    task.cancel()
            await until_equal((0, 0), lambda: booked(probe))


async def requests_booked(probe: Probe) -> int:
    """Requests of the one instance."""
    return (await booked(probe))[0]


async def first_tokens(engine: Live) -> int:
    """How many requests have had one, by the engine's own metrics."""
    async with engine.http.get("/metrics") as response:
        totals = parse_samples(await response.read())["0"].totals
    assert totals is not None
    return totals.first_tokens_count


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    """A request that is answered at its end."""
    async with client.post(url, json=body) as response:
        await response.read()


async def has_joined(probe: Probe) -> bool:
    """Whether the instance is in its fleet."""
    return 0 in await probe.slots()
