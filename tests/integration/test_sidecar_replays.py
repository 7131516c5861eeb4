"""Replays that hang, repeat themselves or are of somebody else: nothing wrong is claimed."""

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from cache_truth import CHAT, Cache, warmed
from engine_stand_in import EngineStandIn, EventPublisher
from sidecar_run import Probe, metric, running
from waiting import until, until_equal

from indexer.engine import ring
from indexer.engine.ring import Ring
from indexer.errors import ReplayFailed

pytestmark = pytest.mark.integration


async def test_a_hanging_replay_ends_the_lease(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While live batches wait for it the index may claim too much, so nobody may rely on it."""
    monkeypatch.setattr(ring, "REPLAY_SILENCE_S", 3.0)
    engine = EngineStandIn()
    publisher = engine.publishers[0]
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(publisher)
        await warmed(cache, probe)
        publisher.answers_replays = False
        asked_count = publisher.replays_count
        await cache.serve(CHAT)
        await until(lambda: publisher.replays_count > asked_count, "the silence is checked")
        await cache.evict(CHAT, keep=1)
        await until_equal(0, lambda: metric(metrics, "lease_held"))
        publisher.answers_replays = True
        await cache.until_exact(probe)
        await until_equal(1, lambda: metric(metrics, "lease_held"))


async def test_a_ring_that_begins_right_behind_proves_nothing(
    redis_socket: Path, probe: Probe
) -> None:
    """Another process on the same sockets, whose ring begins where the last one was left."""
    first = EventPublisher(ring_batches=3)
    engine = EngineStandIn(publishers=[first])
    async with engine, running(engine, redis_socket):
        cache = Cache(first)
        await cache.serve(CHAT)
        await cache.until_exact(probe)
        ports = (first.port, first.replay_port or 0)
        first.close()
        other = EventPublisher(ring_batches=3, ports=ports)
        for _ in range(first.sequence + 3):  # the ring begins exactly at the batch expected next
            await other.publish({"type": "Novelty"}, skip_live=True)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(other.serve_replays())
            await until_equal(0, lambda: probe.eligible_depth(CHAT))
            serving.cancel()
        other.close()


async def test_a_replay_that_goes_back_is_no_replay() -> None:
    """One that repeats itself for ever would hold up the live batches for ever."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        batches = Ring(context, f"tcp://127.0.0.1:{port}").batches(5)
        asking = asyncio.ensure_future(anext(batches))
        client, *_ = await router.recv_multipart()
        for _ in range(2):
            await router.send_multipart([client, b"", b"", (5).to_bytes(8, "big"), b"batch"])
        assert await asking == (5, b"batch")
        with pytest.raises(ReplayFailed, match="answered 5, not 6"):
            await anext(batches)
    finally:
        context.destroy(linger=0)
