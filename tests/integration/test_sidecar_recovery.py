"""Losses of events, injected for real: afterwards the index says what the engine holds."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from cache_truth import CHAT, OTHER, THIRD, Cache, prompt, warmed
from engine_stand_in import EngineStandIn, EventPublisher
from prometheus_client import CollectorRegistry
from sidecar_run import Probe, metric, running, until_subscribed
from waiting import until, until_equal

from indexer.engine import subscriber
from indexer.engine.history import Drained, Item, Received
from indexer.engine.subscriber import Subscriber

pytestmark = pytest.mark.integration

CAPACITY_BLOCKS = 20


async def lose_a_store_and_removals(cache: Cache) -> None:
    """Two batches never reach the sidecar, the one behind them does."""
    await cache.evict(OTHER, keep=1, skip_live=True)
    await cache.serve([*CHAT, *prompt(4, 2)], skip_live=True)
    await cache.serve(prompt(5, 1))


async def test_gap_that_the_ring_covers_costs_nothing(
    redis_socket: Path, probe: Probe, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost removals and stores come from the ring; nothing is lost, nothing is doubted."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(engine.publishers[0])
        await warmed(cache, probe)
        await lose_a_store_and_removals(cache)
        await cache.until_exact(probe)
        assert (metric(metrics, "gaps_total"), metric(metrics, "blocks_set_aside")) == (0, 0)
        assert await probe.completeness() == 1
    assert "gap_filled" in capsys.readouterr().out


async def recover_by_use(cache: Cache, probe: Probe, metrics: CollectorRegistry) -> None:
    """A loss has happened: nothing wrong is claimed, and what is used again is claimed in full."""
    new = cache.prompts[-1]
    await until_equal(cache.depth(new), lambda: probe.eligible_depth(new))
    assert not await cache.claims_too_much(probe)
    assert await probe.eligible_depth(CHAT) == 0
    assert metric(metrics, "gaps_total") > 0
    await until(lambda: metric(metrics, "blocks_set_aside") > 0, "blocks are in doubt")
    await until(lambda: less_than_complete(probe), "completeness falls")
    # The next turn of a conversation names what it stands on; what the lost batch told is known
    # to nobody but the engine, and shows in its reports.
    for tokens in list(cache.prompts):
        await cache.serve([*tokens, *prompt(len(cache.prompts), 1)])
    for tokens in (CHAT, OTHER, THIRD):
        await until_equal(cache.depth(tokens), lambda t=tokens: probe.eligible_depth(t))
    await cache.until_exact_by_use(probe)
    assert metric(metrics, "notices_total") > 0
    # What was missed and is never used again has given way to as many blocks as the engine has.
    await cache.serve(prompt(99, CAPACITY_BLOCKS))
    await until_equal(1.0, probe.completeness)


async def less_than_complete(probe: Probe) -> bool:
    """Whether the sidecar says that it may not know everything."""
    return await probe.completeness() < 1


async def test_gap_that_the_ring_has_passed(redis_socket: Path, probe: Probe) -> None:
    """Every block is doubted, none forgotten: the next use of a prompt proves all of it."""
    engine = EngineStandIn(
        publishers=[EventPublisher(ring_batches=1)], capacity_blocks=CAPACITY_BLOCKS
    )
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(engine.publishers[0])
        await warmed(cache, probe)
        await lose_a_store_and_removals(cache)
        await recover_by_use(cache, probe, metrics)


async def test_gap_without_a_ring(redis_socket: Path, probe: Probe) -> None:
    """An engine without a replay socket: the same, and the metrics say what is missing."""
    engine = EngineStandIn(
        publishers=[EventPublisher(has_replay=False)], capacity_blocks=CAPACITY_BLOCKS
    )
    async with engine, running(engine, redis_socket) as metrics:
        await until_subscribed(engine.publishers[0], probe)
        cache = Cache(engine.publishers[0])
        await warmed(cache, probe)
        await lose_a_store_and_removals(cache)
        await recover_by_use(cache, probe, metrics)
        assert metric(metrics, "replay_available") == 0


async def test_new_process_without_a_ring(redis_socket: Path, probe: Probe) -> None:
    """Without a ring a new connection is a new process, whatever its sequence numbers say."""
    first = EngineStandIn(publishers=[EventPublisher(has_replay=False)])
    async with first, running(first, redis_socket) as metrics:
        await until_subscribed(first.publishers[0], probe)
        await warmed(Cache(first.publishers[0]), probe)
        first.publishers[0].close()
        second = EventPublisher(has_replay=False, ports=(first.publishers[0].port, 0))
        cache = Cache(second, seed=1)
        await until(lambda: metric(metrics, "restarts_total") == 1, "the sidecar starts over")
        cache.prompts = [CHAT, OTHER, THIRD]
        await cache.until_exact(probe)
        await cache.serve(THIRD)
        await until(lambda: served(cache, probe), "the new process's blocks")
        assert not await cache.claims_too_much(probe)
        second.close()


async def served(cache: Cache, probe: Probe) -> bool:
    """Publish something new until it arrives: without a replay nothing else tells."""
    await cache.evict(THIRD)
    await cache.serve(THIRD)
    return await probe.eligible_depth(THIRD) == len(THIRD) // 16


@pytest.mark.parametrize(("waiting", "overflowed"), [(2, False), (5, True)])
async def test_check_without_a_ring_empties_the_queue(
    monkeypatch: pytest.MonkeyPatch, waiting: int, overflowed: bool
) -> None:
    """Everything that waited is delivered before the answer, which tells whether that was all."""
    monkeypatch.setattr(subscriber, "LIVE_MESSAGES_MAX", 3)
    publisher = EventPublisher(has_replay=False)
    endpoint = f"tcp://127.0.0.1:{publisher.port}"
    monkeypatch.setattr(subscriber, "DRAINED_S", 2.0)
    taken: list[Item] = []
    note = taken.append
    async with (
        Subscriber(endpoint=endpoint, bind=False, replay_endpoint=None, topic=None) as events,
        asyncio.TaskGroup() as tasks,
    ):

        async def take() -> None:
            async with contextlib.aclosing(events.receive()) as items:
                async for item in items:
                    note(item)

        taking = tasks.create_task(take())

        async def arrives() -> bool:
            await publisher.publish()
            return any(isinstance(item, Received) for item in taken)

        await until(arrives, "the subscription takes effect")
        await until_equal(publisher.sequence - 1, lambda: taken[-1].sequence)
        taken.clear()
        events.check()
        for _ in range(waiting):
            await publisher.publish()
        await until(lambda: any(isinstance(item, Drained) for item in taken), "an answer")
        answer = next(i for i, item in enumerate(taken) if isinstance(item, Drained))
        assert (taken[answer], answer) == (Drained(overflowed), min(waiting, 2))
        taking.cancel()
    publisher.close()
