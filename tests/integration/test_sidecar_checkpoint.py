"""A sidecar that is started again beside an engine that lives on."""

import asyncio
import signal
from pathlib import Path

import pytest
from cache_truth import CHAT, OTHER, THIRD, Cache, prompt, warmed
from engine_stand_in import EngineStandIn, EventPublisher
from prometheus_client import CollectorRegistry
from sidecar_process import sidecar_process
from sidecar_run import Probe, metric, running
from waiting import until, until_equal

from indexer import checkpoint_keeper
from indexer.contract.limits import INSTANCE_LEASE_TTL_S
from indexer.errors import CheckpointUnwritable

pytestmark = pytest.mark.integration

OFTEN = {
    "indexer.checkpoint_keeper:WRITE_EVERY_MIN_S": 0.1,
    "indexer.checkpoint_keeper:WRITE_EVERY_RATIO": 0.0,
    "indexer.checkpoint_keeper:LOOK_S": 0.05,
    "indexer.contract.functions:INSTANCE_LEASE_TTL_S": 1.0,
}


def loads(metrics: CollectorRegistry) -> dict[str, float]:
    """Checkpoints looked for, by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "timestable_indexer_checkpoint_loads_total"
    }


async def move_on(cache: Cache) -> None:
    """What an engine does while its sidecar is away."""
    await cache.evict(OTHER, keep=1)
    await cache.serve([*CHAT, *prompt(4, 2)])


def short_ring() -> EngineStandIn:
    """An engine whose ring holds the last three batches."""
    return EngineStandIn(publishers=[EventPublisher(ring_batches=3)])


async def test_sidecar_goes_on_from_its_checkpoint(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """It left in order; what the ring holds no more is known all the same, and nothing is lost."""
    engine = short_ring()
    async with engine:
        cache = Cache(engine.publishers[0])
        async with running(engine, redis_socket, checkpoint_path=tmp_path) as metrics:
            await warmed(cache, probe)
            assert loads(metrics) == {"absent": 1}
        await move_on(cache)
        async with running(engine, redis_socket, checkpoint_path=tmp_path) as metrics:
            await cache.until_exact(probe)
            assert loads(metrics) == {"used": 1}
            assert metric(metrics, "gaps_total") == 0
            await until_equal(1.0, probe.completeness)
            await cache.evict(CHAT, keep=2)  # the names of blocks are known as well
            await cache.until_exact(probe)


async def test_killed_sidecar_goes_on_from_its_checkpoint(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """Killed without warning: the last checkpoint, and the ring from there on."""
    engine = short_ring()
    async with engine:
        cache = Cache(engine.publishers[0])
        options = {"constants": OFTEN, "checkpoint_path": tmp_path}
        async with sidecar_process(engine, redis_socket, **options) as first:
            await warmed(cache, probe)
            await until(lambda: written_ns(tmp_path) > 0, "a checkpoint is written", 20)
            before_ns = written_ns(tmp_path)
            await cache.serve(prompt(5, 1))
            await until(lambda: written_ns(tmp_path) > before_ns, "and another one", 20)
            first.child.kill()
            await first.child.wait()
        await move_on(cache)
        async with sidecar_process(engine, redis_socket, **options) as second:
            await second.until_said("checkpoint_used")
            await until_equal(-1, lambda: lease_of(probe, slot=0))
            await cache.until_exact(probe)
            assert second.said("history_lost") == 0
            second.child.send_signal(signal.SIGTERM)
            assert await second.child.wait() == 0


def written_ns(directory: Path) -> int:
    """When the newest checkpoint was written; 0 when there is none."""
    return max((path.stat().st_mtime_ns for path in directory.glob("*.checkpoint")), default=0)


async def lease_of(probe: Probe, slot: int) -> int:
    """-1 when a slot's lease has ended."""
    counters = await probe.counters()
    assert counters is not None
    return 0 if counters.slots["lease_until_s"][slot] >= counters.now_s else -1


async def test_without_a_checkpoint_the_ring_has_to_do(redis_socket: Path, probe: Probe) -> None:
    """What the ring has lost is not claimed, and completeness says so; use makes it good."""
    engine = short_ring()
    async with engine:
        cache = Cache(engine.publishers[0])
        async with running(engine, redis_socket):
            await warmed(cache, probe)
        await move_on(cache)
        async with running(engine, redis_socket) as metrics:
            await until(lambda: metric(metrics, "gaps_total") == 1, "the gap is noticed")
            await until(lambda: less_than_complete(probe), "completeness falls")
            assert not await cache.claims_too_much(probe)
            await cache.until_exact_by_use(probe)


async def less_than_complete(probe: Probe) -> bool:
    """Whether the sidecar says that it may not know everything."""
    return await probe.completeness() < 1


async def test_checkpoint_that_the_ring_has_passed(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """Its blocks are doubted, not lost: nothing is claimed until the engine uses it again."""
    engine = short_ring()
    async with engine:
        cache = Cache(engine.publishers[0])
        async with running(engine, redis_socket, checkpoint_path=tmp_path):
            await warmed(cache, probe)
        await move_on(cache)
        for number in range(5, 9):
            await cache.serve(prompt(number, 1))
        async with running(engine, redis_socket, checkpoint_path=tmp_path) as metrics:
            await until_equal(1, lambda: probe.eligible_depth(prompt(8, 1)))
            assert (loads(metrics), metric(metrics, "gaps_total")) == ({"used": 1}, 1)
            assert [await probe.eligible_depth(tokens) for tokens in (CHAT, OTHER)] == [0, 0]
            await cache.serve([*THIRD, *prompt(9, 1)])
            await until_equal(3, lambda: probe.eligible_depth(THIRD))
            await cache.until_exact_by_use(probe)


async def test_checkpoint_of_an_earlier_process(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """The engine was started anew meanwhile: nothing of its earlier life is credited."""
    first = EngineStandIn()
    async with first:
        async with running(first, redis_socket, checkpoint_path=tmp_path):
            await warmed(Cache(first.publishers[0]), probe)
        ports = (first.publishers[0].port, first.publishers[0].replay_port)
        http_port = first.port
    second = EngineStandIn(publishers=[EventPublisher(ports=ports)], port=http_port)
    async with second:
        cache = Cache(second.publishers[0])  # with the same names for the same contents
        for tokens in (THIRD, OTHER, CHAT):
            await cache.serve(tokens)
        await cache.evict(CHAT, keep=2)
        async with running(second, redis_socket, checkpoint_path=tmp_path) as metrics:
            await cache.until_exact(probe)
            assert loads(metrics) == {"refused": 1}


async def test_broken_checkpoint_is_no_checkpoint(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """A file that was cut off: a warning, and everything from the ring."""
    engine = EngineStandIn()
    async with engine:
        cache = Cache(engine.publishers[0])
        async with running(engine, redis_socket, checkpoint_path=tmp_path):
            await warmed(cache, probe)
        cut_off(tmp_path)
        async with running(engine, redis_socket, checkpoint_path=tmp_path) as metrics:
            await cache.until_exact(probe)
            assert loads(metrics) == {"unusable": 1}


def cut_off(directory: Path) -> None:
    """Take the end off the only checkpoint."""
    (path,) = directory.glob("*.checkpoint")
    path.write_bytes(path.read_bytes()[:-10])


async def test_checkpoints_need_a_ring(redis_socket: Path, probe: Probe, tmp_path: Path) -> None:
    """Only a ring can tell whose checkpoint it is, so without one none is written."""
    engine = EngineStandIn(publishers=[EventPublisher(has_replay=False)])
    async with engine:
        async with running(engine, redis_socket, checkpoint_path=tmp_path) as metrics:
            cache = Cache(engine.publishers[0])

            async def arrives() -> bool:
                await cache.evict(THIRD)
                await cache.serve(THIRD)
                return await probe.eligible_depth(THIRD) == 3

            await until(arrives, "the sidecar sees a batch")
        assert (written_ns(tmp_path), loads(metrics)) == (0, {})


async def test_unwritable_directory_ends_the_sidecar(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """At the start, naming the option: not when the checkpoint would have been needed."""
    (tmp_path / "file").write_text("not a directory")
    engine = EngineStandIn()
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            engine,
            running(engine, redis_socket, checkpoint_path=tmp_path / "file"),
            asyncio.timeout(INSTANCE_LEASE_TTL_S),
        ):
            await asyncio.Event().wait()  # cancelled when the sidecar ends
    assert caught.group_contains(CheckpointUnwritable, match="checkpoint_path")


async def test_full_disk_is_told_and_tried_again(
    redis_socket: Path, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is counted; the sidecar goes on, and so do checkpoints."""
    monkeypatch.setattr(checkpoint_keeper, "WRITE_EVERY_MIN_S", 0.05)
    monkeypatch.setattr(checkpoint_keeper, "WRITE_EVERY_RATIO", 0.0)
    monkeypatch.setattr(checkpoint_keeper, "LOOK_S", 0.02)
    directory = tmp_path / "checkpoints"
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket, checkpoint_path=directory) as metrics:
        cache = Cache(engine.publishers[0])
        await until(directory.exists, "the sidecar has started")
        directory.rmdir()
        await warmed(cache, probe)
        await until(lambda: metric(metrics, "checkpoint_failures_total"), "a failure is counted")
        directory.mkdir()
        await until(lambda: any(directory.glob("*.checkpoint")), "and it is tried again")
        await until(lambda: metric(metrics, "checkpoint_bytes") > 100, "the size is told")
        assert metric(metrics, "checkpoint_age_seconds") < 10
