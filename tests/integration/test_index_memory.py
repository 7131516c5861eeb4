"""The memory of the index: measured, bounded, and what happens when Redis has none left."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from builders import make_fleet_record
from engine_stand_in import EngineStandIn, stored
from redis_servers import RedisCluster, RedisServer, redis_server
from sidecar_run import FLEET, Probe, chain_of, metric, running
from waiting import until, until_equal

from indexer.contract import block_hash, fleet_functions, functions, index_functions, reservations
from indexer.contract.identifiers import BlockHash, RouterId, SlotIndex
from indexer.contract.link import connected
from indexer.contract.records import FleetRecord
from indexer.publishing import budget, memory, sweeper

pytestmark = pytest.mark.integration

CHAIN_BLOCKS = 25
ROUTER = RouterId("r")
EVERY_BUCKET = """#!lua flags=no-writes
local all = {}
for bucket = 0, 2 ^ ARGV[1] - 1 do
  local fields = redis.call('HGETALL', KEYS[1] .. ':' .. bucket)
  for i = 1, #fields do all[#all + 1] = fields[i] end
end
return all
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A server of our own, whose memory nobody else uses."""
    with redis_server(tmp_path / "redis") as server:
        await until(server.answers, "the server answers")
        yield server


def chains(engine: int, count: int, blocks: int = CHAIN_BLOCKS) -> list[list[int]]:
    """Token ids of prompts that share nothing."""
    return [
        [1_000_000 * engine + 2000 * k + i for i in range(blocks) for _ in range(16)]
        for k in range(count)
    ]


async def publish(engine: EngineStandIn, prompts: Sequence[list[int]], first: int = 0) -> None:
    """Let an engine hold these prompts; the names of its blocks count up from `first`."""
    for tokens in prompts:
        blocks = len(tokens) // 16
        await engine.publishers[0].publish(stored(range(first, first + blocks), tokens))
        first += blocks


async def held(client: redis.asyncio.Redis, slot: int) -> set[bytes]:
    """Every block that an instance of the only partition holds in the index, at one moment."""
    fleet = await fleet_functions.read_fleet(client, FLEET)
    assert fleet is not None
    everything = await client.eval(
        EVERY_BUCKET, 1, index_functions.anchor(fleet, 0), fleet.bucket_bits
    )
    blocks, holders = everything[::2], everything[1::2]
    assert all(len(held_by) <= 31 for held_by in holders)
    return {own for own, held_by in zip(blocks, holders, strict=True) if slot in held_by}


def leading(prompts: Sequence[list[int]], blocks: set[bytes]) -> list[int]:
    """How many leading blocks of each prompt are in a set that must have nothing else."""
    lengths = []
    for tokens in prompts:
        chain = block_hash.split(BlockHash(chain_of(tokens)))
        there = [own in blocks for own in chain]
        lengths.append(sum(there))
        assert there == [True] * sum(there) + [False] * (len(chain) - sum(there)), "a hole"
    assert sum(lengths) == len(blocks), "blocks that the engine does not hold"
    return lengths


async def fill(link: functions.BatchClient, fleet: FleetRecord, blocks: int) -> None:
    """Blocks of instances 0 to 63, one holder each."""
    rng = np.random.default_rng(7)
    for slot in range(64):
        await functions.run(link, index_functions.open_slot(fleet, SlotIndex(slot), 1))
        mine = [BlockHash(rng.bytes(8)) for _ in range(blocks // 64)]
        pages = [mine[i : i + 256] for i in range(0, len(mine), 256)]
        await functions.run_all(
            link, [index_functions.store(fleet, SlotIndex(slot), 1, page) for page in pages]
        )


async def test_the_estimate_is_what_the_server_uses(server: RedisServer) -> None:
    """By a sample of its buckets, an index of 64,000 blocks is measured within 15 %."""
    fleet = make_fleet_record(bucket_bits=10)
    async with connected(server.url, deadline_s=5.0) as link:
        await functions.run(link, fleet_functions.create(fleet))
        await fill(link, fleet, 64)
        before = (await server.info("memory"))["used_memory"]
        await fill(link, fleet, 64_000)
        used_bytes = (await server.info("memory"))["used_memory"] - before
        (sample,) = await memory.measure(link, fleet, buckets_max=256)
        assert sample.buckets < 1 << fleet.bucket_bits
        assert memory.index_bytes(fleet, sample) == pytest.approx(used_bytes, rel=0.15)
        per_membership = memory.bytes_per_membership([sample])
        assert per_membership == pytest.approx(used_bytes / 64_000, rel=0.15)


async def test_the_coldest_instances_give_way(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a limit the instance in use keeps all; the others publish again when there is room."""
    monkeypatch.setattr(sweeper, "ROUND_S", 0.05)
    monkeypatch.setattr(memory, "MEASURE_S", 0.2)  # the last one may come amid the withholding
    limit_bytes = 51_000
    options = {"index_bytes_max": limit_bytes, "instances_expected": 4}
    engines = [EngineStandIn() for _ in range(3)]
    prompts = [chains(n, 40) for n in range(3)]
    async with AsyncExitStack() as stack:
        metrics = []
        for n, engine in enumerate(engines):
            await stack.enter_async_context(engine)
            metrics.append(
                await stack.enter_async_context(running(engine, redis_socket, **options))
            )
            await until_equal(n + 1, lambda: count_of(probe.slots))
        await functions.run(probe.redis, reservations.register(FLEET, ROUTER, begin=True))
        candidates = np.array([(0, 1, 500)], reservations.CANDIDATE)
        await functions.run(probe.redis, reservations.reserve(FLEET, ROUTER, 1, candidates))
        for engine, mine in zip(engines, prompts, strict=True):
            await publish(engine, mine)

        async def is_divided() -> bool:
            blocks = [len(await held(probe.redis, slot)) for slot in range(3)]
            return blocks[0] == 1000 and all(300 < b < 900 for b in blocks[1:])

        await until(is_divided, "the reserved one keeps all, the others give way alike")
        for slot in range(3):
            leading(prompts[slot], await held(probe.redis, slot))
        assert await size_bytes(redis_socket) <= limit_bytes
        assert [metric(m, "blocks_withheld") > 0 for m in metrics] == [False, True, True]
        counters = await probe.counters()
        assert counters is not None
        assert counters.slots["index_blocks"].tolist() == [1000] * 3  # what each would publish

        async def is_told() -> bool:
            told_bytes = sum(metric(m, "index_bytes") for m in metrics)
            return bool(told_bytes == pytest.approx(await size_bytes(redis_socket), rel=0.15))

        await until(is_told, "the one that sweeps exports the size of the index")

        await engines[0].publishers[0].publish({"type": "AllBlocksCleared"})
        for slot, expected in enumerate([0, 1000, 1000]):
            await until_equal(expected, lambda slot=slot: count_of(held, probe.redis, slot))
        assert sum(metric(m, "blocks_withheld") for m in metrics) == 0


async def count_of(read: Callable[..., object], *args: object) -> int:
    """How many there are of what is read."""
    return len(await read(*args))  # type: ignore[misc, arg-type]


async def size_bytes(redis_socket: Path) -> float:
    """The whole index, every bucket measured."""
    async with connected(f"unix://{redis_socket}", deadline_s=5.0) as link:
        fleet = await fleet_functions.read_fleet(link, FLEET)
        assert fleet is not None
        (sample,) = await memory.measure(link, fleet, buckets_max=256)
        assert sample.buckets == 1 << fleet.bucket_bits
        return memory.index_bytes(fleet, sample)


async def test_a_full_server_holds_what_fits(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores are refused: blocks give way, the rest is exact, and all else goes on."""
    monkeypatch.setattr(budget, "SERVER_FULL_RATIO", 100.0)  # no budget spares it the experience
    prompts = chains(1, 70, blocks=1000)
    engine = EngineStandIn(capacity_blocks=35_000)
    async with engine, server.client() as client:
        probe = Probe(client)
        async with running(engine, server.url, instances_expected=1) as metrics:
            await until_equal(1, lambda: count_of(probe.slots))
            await functions.run(client, reservations.register(FLEET, ROUTER, begin=True))
            used_bytes = (await server.info("memory"))["used_memory"]
            await client.config_set("maxmemory", used_bytes + 700_000)
            await publish(engine, prompts)
            await until(lambda: metric(metrics, "oom_trims_total") > 0, "blocks give way")

            async def is_exact() -> bool:
                if metric(metrics, "pending_blocks"):  # what is read takes the server's memory
                    return False
                return len(await held(client, 0)) == metric(metrics, "index_blocks") > 0

            await until(is_exact, "the index has what its sidecar believes", deadline_s=30.0)
            assert 10_000 < sum(leading(prompts, await held(client, 0))) < 70_000
            assert metric(metrics, "blocks_withheld") > 0

            await client.config_set("maxmemory", 1)
            candidates = np.array([(0, 1, 500)], reservations.CANDIDATE)
            reply = await functions.run(client, reservations.reserve(FLEET, ROUTER, 1, candidates))
            assert reply[0] == b"ok"
            await publish(engine, chains(2, 1), first=100_000)
            await until_equal(1.0, lambda: metric(metrics, "lease_held"))
            assert await functions.run(client, reservations.release(FLEET, ROUTER, 1)) == 1
            leading(prompts, await held(client, 0))

            monkeypatch.setattr(budget, "RELAX_S", 0.1)
            await client.config_set("maxmemory", 0)
            everything = [*prompts, *chains(2, 1)]
            await until_equal(70_000 + CHAIN_BLOCKS, lambda: metric(metrics, "index_blocks"))
            await until_equal(0.0, lambda: metric(metrics, "pending_blocks"))
            await until_equal(70_000 + CHAIN_BLOCKS, lambda: count_of(held, client, 0))
            leading(everything, await held(client, 0))
            assert metric(metrics, "republishes_total") == 0


async def test_budgets_keep_a_server_from_filling_up(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a maxmemory limits the index by itself, before it refuses anything."""
    monkeypatch.setattr(sweeper, "ROUND_S", 0.05)
    prompts = chains(1, 60, blocks=500)
    engine = EngineStandIn(capacity_blocks=30_000)
    async with engine, server.client() as client:
        probe = Probe(client)
        async with running(engine, server.url, instances_expected=1) as metrics:
            await until_equal(1, lambda: count_of(probe.slots))
            used_bytes = (await server.info("memory"))["used_memory"]
            await client.config_set("maxmemory", int((used_bytes + 300_000) / 0.95))
            monkeypatch.setattr(memory, "MEASURE_S", 0.2)
            await until(lambda: metric(metrics, "index_budget_blocks") > 0, "a budget is known")
            await publish(engine, prompts)
            await until(lambda: metric(metrics, "blocks_withheld") > 0, "blocks are withheld")
            await until_equal(0.0, lambda: metric(metrics, "pending_blocks"))
            leading(prompts, await held(client, 0))
            info = await server.info("memory")
            assert info["used_memory"] < info["maxmemory"]
            assert metric(metrics, "oom_trims_total") == 0


async def test_a_server_that_may_evict_is_told_of(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that drops keys breaks what the index rests on: a gauge and a warning say so."""
    monkeypatch.setattr(sweeper, "ROUND_S", 0.05)
    monkeypatch.setattr(memory, "MEASURE_S", 0.1)
    engine = EngineStandIn()
    await server.ask("CONFIG", "SET", "maxmemory", "100mb")
    await server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    async with engine, running(engine, server.url) as metrics:
        await until_equal(1.0, lambda: metric(metrics, "redis_evicts"))
        await server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await until_equal(0.0, lambda: metric(metrics, "redis_evicts"))


async def test_each_partition_is_measured_where_it_is(cluster: RedisCluster) -> None:
    """In a cluster every shard tells of itself, and partitions on one server share its limit."""
    fleet = make_fleet_record(bucket_bits=4, partitions=3)
    async with connected(cluster.url, deadline_s=5.0) as link:
        await functions.run(link, fleet_functions.create(fleet))
        slot = SlotIndex(256)
        await functions.run(link, index_functions.open_slot(fleet, slot, 1))
        own = [BlockHash(bytes([n]) * 8) for n in range(100)]
        assert await functions.run(link, index_functions.store(fleet, slot, 1, own)) == 1
        samples = await memory.measure(link, fleet, buckets_max=16)
    assert [sample.memberships for sample in samples] == [0, 100, 0]
    assert len({sample.server.run_id for sample in samples if sample.server}) == 3
