"""How instances join, are kept, swept and left: a real HTTP engine, the embedded server."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from engine_stand_in import EngineStandIn, EventPublisher, stored
from sidecar_run import FLEET, PROMPT, Probe, metric, running
from waiting import WAIT_S, until, until_equal

from indexer import rank
from indexer.contract import fleet_functions, functions, keys, reservations, upkeep
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.limits import INSTANCE_LEASE_TTL_S, SLOTS_PER_PARTITION_MAX
from indexer.contract.records import InstanceRecord, SlotFlag
from indexer.errors import EngineUnsuitable
from indexer.publishing import membership

pytestmark = pytest.mark.integration


async def test_instance_is_announced(redis_socket: Path, probe: Probe) -> None:
    """What the engine tells over HTTP is what routers read."""
    engine = EngineStandIn(
        models=(
            {"id": "m", "root": "/models/r", "max_model_len": 4096},
            {"id": "alias", "root": "/models/r", "max_model_len": 4096},
            {"id": "lora", "root": "/l", "parent": "m"},
        )
    )
    async with engine, running(engine, redis_socket, advertised_url="http://pod-7:8000/"):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        (record,) = await probe.instances()
        assert record.instance_id.startswith("pod-7:8000/0#")
        assert (
            InstanceRecord(
                instance_id=record.instance_id,
                url="http://pod-7:8000",
                models=["m", "alias"],
                model_root="/models/r",
                block_size_tokens=16,
                adapters=["lora"],
                max_model_len_tokens=4096,
                capacity_blocks=1000,
                engine_version="0.32.0",
            )
            == record
        )


async def test_engine_load_is_published(redis_socket: Path, probe: Probe) -> None:
    """Running, waiting and KV$ usage arrive in the fleet's counters."""
    engine = EngineStandIn(running_count=3, waiting_count=2)

    async def load() -> list[int]:
        counters = await probe.counters()
        row = counters.slots[0] if counters is not None and len(counters.slots) else None
        names = ("running_count", "waiting_count", "kv_usage_millionths")
        return [] if row is None else [int(row[name]) for name in names]

    async with engine, running(engine, redis_socket):
        await until_equal([3, 2, 250_000], load)


async def test_lease_ends_with_the_engine(redis_socket: Path, probe: Probe) -> None:
    """An engine that does not answer is not renewed; it comes back as the same instance."""
    engine = EngineStandIn()

    async def is_renewed() -> bool:
        counters = await probe.counters()
        assert counters is not None
        left_s = float(counters.slots["lease_until_s"][0]) - counters.now_s
        return left_s >= INSTANCE_LEASE_TTL_S - 1

    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        (before,) = await probe.instances()
        engine.status = 503
        await until_equal(False, is_renewed)
        assert metric(metrics, "lease_held") == 0
        engine.status = 200
        await until_equal(True, is_renewed)
        assert [before] == await probe.instances()
        assert await probe.depths() == [4]


async def test_graceful_leave_frees_the_slot(redis_socket: Path, probe: Probe) -> None:
    """After the sidecar has left nothing of the instance remains but the fleet itself."""
    engine = EngineStandIn()
    async with engine:
        async with running(engine, redis_socket):
            await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await until_equal([4], probe.depths)
        assert await probe.slots() == {}
        assert await probe.instances() == []
        assert await probe.redis.keys(keys.partition(FLEET, 0, 1) + ":*") == []


async def test_slot_of_a_crashed_sidecar_is_swept(redis_socket: Path, probe: Probe) -> None:
    """A slot that is closing without anybody is swept and freed by another sidecar."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        async with running(two, redis_socket):
            await until_equal({0: SlotFlag.USED, 1: SlotFlag.USED}, probe.slots)
            await two.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await until_equal([0, 4], probe.depths)
            await functions.run(probe.redis, fleet_functions.close(FLEET, SlotIndex(1), 1, -1))
            # Its own sidecar notices, joins anew, and the closed slot becomes free again.
            await until_equal({0: SlotFlag.USED, 2: SlotFlag.USED}, probe.slots)
            await until_equal([0, 0, 4], probe.depths)


async def test_dead_routers_are_reaped(redis_socket: Path, probe: Probe) -> None:
    """What a dead router had reserved is taken back by a sidecar."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        router = RouterId("gone")
        await functions.run(probe.redis, reservations.register(FLEET, router, begin=True))
        candidates = np.array([(0, 1, 500)], reservations.CANDIDATE)
        await functions.run(probe.redis, reservations.reserve(FLEET, router, 1, candidates))
        await probe.redis.zadd(keys.routers(FLEET), {router: 1.0})

        async def reserved() -> int:
            counters = await probe.counters()
            assert counters is not None
            return int(counters.slots["reserved_prefill_tokens"][0])

        await until_equal(0, reserved)
        assert not await probe.redis.exists(keys.ledger(FLEET, router))


async def test_two_ranks_are_two_instances(redis_socket: Path, probe: Probe) -> None:
    """A data-parallel engine has an instance per rank, each with its own index and pin."""
    engine = EngineStandIn(publishers=[EventPublisher(), EventPublisher(rank=1)])
    async with engine, running(engine, redis_socket):
        await engine.publishers[1].publish(stored([1, 2, 3, 4], PROMPT))
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await until_equal([2, 4], probe.depths)
        assert sorted(r.data_parallel_rank or 0 for r in await probe.instances()) == [0, 1]


async def test_sleeping_engine_holds_nothing(redis_socket: Path, probe: Probe) -> None:
    """An engine asleep from level 1 on is marked, and its index taken back."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        engine.sleep_states = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
        await until_equal([0], probe.depths)
        await until_equal({0: SlotFlag.USED | SlotFlag.SLEEPING}, probe.slots)
        assert metric(metrics, "engine_asleep") == 1
        engine.sleep_states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        await until_equal({0: SlotFlag.USED}, probe.slots)


async def test_block_sizes_that_do_not_fit_are_refused(redis_socket: Path, probe: Probe) -> None:
    """The error names both sizes and the option; the slot is given back."""
    engine = EngineStandIn(block_size_tokens=48)
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            engine,
            running(engine, redis_socket, block_size_tokens=32),
            asyncio.timeout(WAIT_S),
        ):
            await asyncio.Event().wait()  # cancelled when the sidecar ends
    assert caught.group_contains(EngineUnsuitable, match="48 tokens .* 32: .*--block_size_tokens")
    assert await probe.slots() == {}


async def test_first_joiner_decides_the_block_size(redis_socket: Path, probe: Probe) -> None:
    """A later instance takes the fleet's canonical size, whatever it was told."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        async with running(two, redis_socket, block_size_tokens=32):
            await two.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await until_equal([0, 4], probe.depths)


async def test_full_fleet_has_a_slot_later(redis_socket: Path, probe: Probe) -> None:
    """Without a free slot the metrics say so; the next one that is freed is taken."""
    first, late = EngineStandIn(), EngineStandIn()
    async with first, late, running(first, redis_socket):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        (record,) = await probe.instances()
        taken = [
            await functions.run(probe.redis, fleet_functions.join(FLEET, record.encode()))
            for _ in range(SLOTS_PER_PARTITION_MAX)
        ]
        assert taken[-2:] == [[255, 1], []]
        await late.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        async with running(late, redis_socket) as metrics:
            await until_equal(1, lambda: metric(metrics, "fleet_full"))
            await functions.run(probe.redis, fleet_functions.close(FLEET, SlotIndex(77), 1, -1))
            await until_equal(4, lambda: depth_of(probe, 77))
            assert metric(metrics, "fleet_full") == 0


async def depth_of(probe: Probe, slot: int) -> int:
    """Leading blocks that a slot claims."""
    return (await probe.depths())[slot]


async def test_silent_engine_outlives_every_expiry(
    redis_socket: Path,
    probe: Probe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine without events for many times the expiry of its fleet's keys, scaled to seconds."""
    ttl_s = 1
    for module in (fleet_functions, upkeep):
        monkeypatch.setattr(module, "DIRECTORY_TTL_S", ttl_s)
    monkeypatch.setattr(membership, "DIRECTORY_RENEW_S", ttl_s / 10)
    monkeypatch.setattr(rank, "QUIET_S", 2 * ttl_s)
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        expiring = [
            keys.directory(),
            keys.fleet(FLEET),
            keys.counters(FLEET),
            keys.instances(FLEET),
        ]
        (record,) = await probe.instances()
        started_s = time.monotonic()

        async def left_ms() -> list[int]:
            return [await probe.redis.pttl(key) for key in expiring]

        async def is_quiet_for_long() -> bool:
            assert all(0 < left <= ttl_s * 1000 for left in await left_ms())
            assert await probe.eligible_depth(PROMPT) == 4
            return time.monotonic() - started_s > 3 * ttl_s

        await until(is_quiet_for_long, "several expiries have passed")
        assert [record] == await probe.instances()
        assert await fleet_functions.read_fleet(probe.redis, FLEET) is not None
        assert metric(metrics, "republishes_total") == 0
        assert metric(metrics, "engine_silence_seconds") > 2 * ttl_s
        assert await probe.completeness() == 1
    assert "engine_quiet" in capsys.readouterr().out
