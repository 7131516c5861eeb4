"""A router that has just come decides like those that have been there all the time."""

from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from builders import make_request
from decision_core import RouterCore, running
from fleets import chain, found_fleet, report, store, until
from redis_servers import redis_server

from indexer.contract.milestones import Milestones
from router.composition import composed
from router.config import RouterConfig
from router.decide import decide
from router.eligibility import eligible_snapshot
from router.policies import POLICIES
from router.snapshot import Decision

pytestmark = pytest.mark.integration

STATES = 50
SEED = 20261130


async def intended(router: RouterCore, prompt: list[int], request_id: str) -> Decision:
    """What a router would do, with nothing booked."""
    served = await router.index.find("m")
    assert served is not None
    hashes = b"".join(chain(served.fleet, prompt))
    milestones = Milestones.of(
        hashes, prompt_tokens=len(prompt), block_size_tokens=served.fleet.block_size_tokens
    )
    snapshot = eligible_snapshot(await router.index.look(served, hashes, milestones), len(prompt))
    request = make_request(len(prompt), request_id=request_id)
    return decide(POLICIES["lmetric"], request, snapshot)


async def test_the_first_decision_of_a_new_router_is_that_of_an_old_one(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Hits, siblings in flight, counters and choice, in random states: all of it is in Redis."""
    rng = np.random.default_rng(SEED)
    fleet = await found_fleet(redis_client, names=["a", "b", "c", "d"])
    prompts = [rng.integers(0, 1000, int(n)).tolist() for n in rng.integers(40, 2000, 12)]
    bookings, chosen, siblings = [], set(), 0
    async with running(redis_socket) as old:
        for state in range(STATES):
            prompt = prompts[int(rng.integers(len(prompts)))]
            hashes = chain(fleet, prompt)
            slot = int(rng.integers(4))
            await store(redis_client, fleet, slot, hashes[: int(rng.integers(1, len(hashes) + 1))])
            await report(redis_client, fleet, slot, *rng.integers(0, 4, 2).tolist())
            for _ in range(int(rng.integers(1, 4))):
                other = prompts[int(rng.integers(len(prompts)))]
                bookings.append((await old.decide(prompt=other))[1])
            for _ in range(len(bookings) // 2):
                booking = bookings.pop(int(rng.integers(len(bookings))))
                old.ledger.prefilled(booking)
                if rng.random() < 0.5:
                    old.ledger.release(booking)
            await until(old.ledger.settled, "settled")

            asked = prompts[int(rng.integers(len(prompts)))]
            expected = await intended(old, asked, str(state))
            async with running(redis_socket) as new:
                decision, booking = await new.decide(prompt=asked, request_id=str(state))
                new.ledger.release(booking)
                await until(new.ledger.settled, "settled")
            assert not decision.degraded
            assert decision.candidates == expected.candidates, (SEED, state)
            chosen.add(decision.instance.instance_id)
            siblings += decision.snapshot.in_flight_tokens.any()
    assert len(chosen) == 4
    assert siblings > 5  # the states were worth comparing


async def test_a_router_that_starts_before_redis_waits_for_it(tmp_path: Path) -> None:
    """Not ready and it says why; then ready by itself, and its first decision has its hits."""
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        config = RouterConfig(redis_url=server.url, port=0)
        async with composed(config) as process:
            await until(process.index.degraded_reason, "it has tried")
            reason = process.index.not_ready_reason() or ""
            assert reason.startswith("Redis has not answered yet (Redis does not answer: ")
            assert "onnect" in reason
            server.start()
            await until(server.answers, "Redis answers")
            await until(lambda: "no instance" in (process.index.not_ready_reason() or ""), "heard")
            async with server.client() as client:
                fleet = await found_fleet(client, names=["a"])
                await store(client, fleet, 0, chain(fleet, list(range(64)))[:3])
            await until(lambda: process.index.not_ready_reason() is None, "ready")
            assert process.index.degraded_reason() is None
            served = await process.index.find("m")
            assert served is not None
            hashes = b"".join(chain(served.fleet, list(range(64))))
            snapshot = eligible_snapshot(await process.index.look(served, hashes), 64)
            assert (snapshot.hit_tokens.tolist(), snapshot.degraded) == ([48], False)
