"""Two data-parallel ranks behind one URL: each is an instance, and requests are pinned to it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from engine_stand_in import EngineStandIn, EventPublisher, stored
from router_edge import FakeEngine
from sidecar_run import Probe, running
from waiting import until_equal

from router.composition import composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration

RANKS = 2
PROMPTS = 8


@dataclass
class Ranks:
    """The engine's API: it caches by the rank that a request is pinned to, and says so in events.

    Attributes:
        publishers: by rank.
        held: prefixes of whole blocks, by rank.
        pins: what each request was pinned to.
    """

    publishers: list[EventPublisher]
    held: list[set[tuple[int, ...]]] = field(default_factory=lambda: [set() for _ in range(RANKS)])
    pins: list[list[str]] = field(default_factory=list)

    async def complete(self, _: FakeEngine, request: web.Request) -> web.StreamResponse:
        """Answer a completion of token ids."""
        pins = request.headers.getall("X-data-parallel-rank", [])
        self.pins.append(pins)
        held = self.held[int(pins[0])]
        prompt = (await request.json())["prompt"]
        prefixes = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        hits = next((i for i, prefix in enumerate(prefixes) if prefix not in held), len(prefixes))
        if new := prefixes[hits:]:
            parent = hash(prefixes[hits - 1]) if hits else None
            tokens = prompt[hits * 16 : len(prefixes) * 16]
            event = stored([hash(prefix) for prefix in new], tokens, parent=parent)
            await self.publishers[int(pins[0])].publish(event)
            held.update(new)
        cached = min(hits * 16, (len(prompt) - 1) // 16 * 16)
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})


async def ask(
    client: aiohttp.ClientSession, prompt: list[int], policy: str
) -> tuple[int | None, int, int]:
    """Rank of the decision, predicted and reported hit tokens; the client's own pin is ignored."""
    async with client.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt},
        headers={
            "x-timestable-explain": "1",
            "x-timestable-policy": policy,
            "x-data-parallel-rank": "7",
        },
    ) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["x-timestable-decision"])
    rank = int(decision["instance"].partition("#")[0].rpartition("/")[2])
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return rank, decision["hit_tokens"], cached


async def test_requests_are_pinned_to_the_rank_that_holds_the_prompt(
    redis_socket: Path, probe: Probe
) -> None:
    """Every request names the rank that was chosen, and a prompt comes back to where it was.

    Ranks have caches of their own: the second asking has the hits that were predicted.
    """
    publishers = [EventPublisher(rank=rank) for rank in range(RANKS)]
    ranks = Ranks(publishers)
    told, serving = EngineStandIn(publishers=publishers), FakeEngine("api", ranks.complete)
    config = RouterConfig(
        redis_url=f"unix://{redis_socket}",
        port=0,
        index_deadline_s=10.0,
        allow_policy_override=True,
    )
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 4096, 16 * n + 9).tolist() for n in range(3, 3 + PROMPTS)]
    async with (
        told,
        serving.serving(),
        running(told, redis_socket, advertised_url=serving.url),
    ):
        await until_equal(RANKS, lambda: joined(probe))
        async with (
            composed(config) as router,
            aiohttp.ClientSession(f"http://127.0.0.1:{router.listeners.port}") as client,
        ):
            await router.index.refresh()
            first = []
            for prompt in prompts:
                rank, predicted, cached = await ask(client, prompt, "round_robin")
                first.append(rank)
                assert (predicted, cached) == (0, 0)
                depths = [len(prompt) // 16 if r == rank else 0 for r in range(RANKS)]
                await until_equal(depths, lambda p=prompt: probe.depths(p))
            again = [await ask(client, prompt, "lmetric") for prompt in prompts]
    hits = [len(prompt) // 16 * 16 for prompt in prompts]
    assert again == list(zip(first, hits, hits, strict=True))
    assert set(first) == set(range(RANKS))
    assert ranks.pins == [[str(rank)] for rank in [*first, *first]]


async def joined(probe: Probe) -> int:
    """Slots in use."""
    return len(await probe.slots())
