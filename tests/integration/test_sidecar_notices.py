"""Routers tell that an engine had more or less than the index said: what its sidecar does."""

from pathlib import Path
from typing import Any

import pytest
from cache_truth import BLOCK, Cache, prompt
from engine_stand_in import EngineStandIn, EventPublisher
from prometheus_client import CollectorRegistry
from sidecar_run import FLEET, PROMPT, Probe, metric, running
from waiting import until, until_equal

from indexer import follower
from indexer.contract import fleet_functions, functions
from indexer.contract.identifiers import SlotIndex
from indexer.engine.vllm_events import Batch, BlockRemoved, decode_batch

pytestmark = pytest.mark.integration

CHAT, OTHER = prompt(1, 6), prompt(2, 4)


def verdicts(metrics: CollectorRegistry) -> dict[str, float]:
    """Notices by verdict."""
    return {
        sample.labels["verdict"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "timestable_indexer_notices_total"
    }


async def test_better_than_predicted_is_credited(redis_socket: Path, probe: Probe) -> None:
    """Blocks the engine shows to have are published, until it removes what nobody can name."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(engine.publishers[0])
        await cache.serve(OTHER)
        await cache.until_exact(probe)
        now_s, slot, _ = await probe.predict(CHAT)
        await probe.tell(now_s, slot, CHAT, 0, 6 * BLOCK)
        await until_equal(6, lambda: probe.eligible_depth(CHAT))
        assert verdicts(metrics) == {"credited": 1}
        await cache.evict(prompt(9, 1))  # nothing of it is held: an empty removal changes nothing
        hidden = Cache(engine.publishers[0], seed=7)
        hidden._held.update(hidden._names(CHAT))
        await hidden.evict(CHAT, keep=5)
        await until_equal(0, lambda: probe.eligible_depth(CHAT))
        await cache.until_exact(probe)


async def test_change_after_the_decision_explains(redis_socket: Path, probe: Probe) -> None:
    """Blocks evicted or stored between decision and admission are nobody's error."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(engine.publishers[0])
        await cache.serve(CHAT)
        await cache.until_exact(probe)
        now_s, slot, predicted = await probe.predict(CHAT)
        await cache.evict(CHAT, keep=2)
        await cache.until_exact(probe)
        await cache.serve(CHAT)  # by the request itself, which hit two blocks
        await cache.until_exact(probe)
        await probe.tell(now_s, slot, CHAT, predicted * BLOCK, 2 * BLOCK)
        await until_equal({"explained": 1.0}, lambda: verdicts(metrics))
        await cache.evict(CHAT, keep=2)
        await cache.until_exact(probe)
        now_s, slot, predicted = await probe.predict(CHAT)
        await cache.serve(CHAT)
        await cache.until_exact(probe)
        await cache.evict(CHAT, keep=3)
        await cache.until_exact(probe)
        await probe.tell(now_s, slot, CHAT, predicted * BLOCK, 6 * BLOCK)
        await until_equal({"explained": 2.0}, lambda: verdicts(metrics))
        await cache.until_exact(probe)  # what came and went is not credited


async def test_malformed_notices_are_counted(redis_socket: Path, probe: Probe) -> None:
    """Garbage in the list of notices costs neither the lease nor the good ones beside it."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await until_equal(0, lambda: probe.eligible_depth(PROMPT))
        call = fleet_functions.notice(FLEET, SlotIndex(0), 1, b"\xc1 garbage")
        await functions.run(probe.redis, call)
        await until_equal({"malformed": 1.0}, lambda: verdicts(metrics))

        async def is_credited() -> bool:
            now_s, slot, depth = await probe.predict(CHAT)
            await probe.tell(now_s, slot, CHAT, 0, 6 * BLOCK)
            return depth == 6

        await until(is_credited, "a good notice is acted upon")


class Forgetful:
    """A decoder that loses the next removal when it is told to."""

    def __init__(self) -> None:
        self.forgets = False

    def __call__(self, payload: bytes) -> Batch:
        batch = decode_batch(payload)
        if self.forgets and any(isinstance(event, BlockRemoved) for event in batch.events):
            self.forgets = False
            return Batch(ts_s=batch.ts_s, events=())
        return batch


async def refute(cache: Cache, probe: Probe, times: int) -> None:
    """Route a prompt whose stale blocks are predicted and not hit."""
    for _ in range(times):
        now_s, slot, predicted = await probe.predict(OTHER)
        actual = cache.depth(OTHER)
        await probe.tell(now_s, slot, OTHER, predicted * BLOCK, actual * BLOCK)


@pytest.mark.parametrize("ring", ["whole", "passed", "none"])
async def test_repeatedly_worse_starts_over(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, ring: str
) -> None:
    """A removal lost inside the sidecar: the third refutation has the history read again.

    Where the ring holds it from its beginning the index is exact at once and keeps its slot; else
    nothing is claimed until the engine shows it.
    """
    decoder = Forgetful()
    monkeypatch.setattr(follower, "decode_batch", decoder)
    options: dict[str, Any] = {"has_replay": ring != "none"}
    publisher = EventPublisher(ring_batches=2 if ring == "passed" else 100, **options)
    engine = EngineStandIn(publishers=[publisher])
    async with engine, running(engine, redis_socket) as metrics:
        cache = Cache(publisher)
        await until(lambda: arrives(cache, probe), "the sidecar sees a batch")
        await cache.serve(prompt(7, 1))
        await cache.until_exact(probe)  # nothing else is on its way
        decoder.forgets = True
        for tokens in (CHAT, OTHER):
            await cache.serve(tokens)
            await cache.until_exact(probe)
        await cache.evict(OTHER, keep=1)
        await cache.serve(prompt(3, 1))
        await until_equal(1, lambda: probe.eligible_depth(prompt(3, 1)))
        assert await cache.claims_too_much(probe)

        await refute(cache, probe, times=2)
        await until_equal({"over": 2.0}, lambda: verdicts(metrics))
        assert metric(metrics, "resyncs_total") == 0
        await refute(cache, probe, times=1)
        await until_equal(1, lambda: metric(metrics, "resyncs_total"))
        if ring == "whole":
            await cache.until_exact(probe)
            assert await probe.completeness() == 1
        else:
            await until_equal(0, lambda: probe.eligible_depth(CHAT))
            await cache.until_exact_by_use(probe)
        await refute(cache, probe, times=4)  # which is none any more
        await until_equal(probe.told_count, lambda: metric(metrics, "notices_total"))
        assert metric(metrics, "resyncs_total") == 1
        assert await probe.slots() == {0: 1}


async def arrives(cache: Cache, probe: Probe) -> bool:
    """Publish something until it is seen: without a replay nothing else tells."""
    await cache.evict(prompt(8, 1))
    await cache.serve(prompt(8, 1))
    return await probe.eligible_depth(prompt(8, 1)) == 1
