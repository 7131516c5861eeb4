"""Router and sidecar commands on a cluster of three shards: the same answers, one round trip."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_fleet_record, make_heartbeat, make_instance
from fleets import chain
from redis.crc import key_slot
from redis.exceptions import ClusterCrossSlotError, ResponseError
from redis_servers import RedisCluster, RedisServer, redis_server
from waiting import until, until_equal

from indexer.contract import (
    fleet_functions,
    functions,
    index_functions,
    keys,
    libraries,
    reservations,
)
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from indexer.contract.link import Link, connected
from indexer.contract.records import EngineCounters, FleetRecord

pytestmark = pytest.mark.integration

DEADLINE_S = 10.0
PROMPT = list(range(1600))  # 100 blocks of 16 tokens
ROUTER = RouterId("r1")


@pytest.fixture
async def link(cluster: RedisCluster) -> AsyncIterator[Link]:
    """A link to the cluster that knows one of its nodes."""
    async with connected(seed(cluster), deadline_s=DEADLINE_S) as link:
        yield link


def seed(cluster: RedisCluster) -> str:
    """The URL of one node only."""
    return f"redis+cluster://127.0.0.1:{cluster.servers[-1].port}"


def key_on(shard: int, name: str = "key") -> str:
    """A key that one of the three shards has."""
    return next(
        key
        for n in range(1000)
        if key_slot((key := f"{{{name}{n}}}").encode()) * 3 // 16384 == shard
    )


async def walkthrough(link: Link, fleet: FleetRecord) -> list[Any]:
    """Every answer in the life of a fleet of eight instances, but those that tell the time."""
    answers: list[Any] = []

    async def note(call: functions.Call, shown: Callable[[Any], Any] = lambda reply: reply) -> None:
        answers.append((call.function, shown(await functions.run(link, call))))

    fleet_id, hashes = fleet.fleet_id, chain(fleet, PROMPT)
    await note(fleet_functions.create(fleet))
    slots = []
    for n in range(8):
        slot, generation = await functions.run(
            link, fleet_functions.join(fleet_id, make_instance(str(n)).encode())
        )
        slots.append(SlotIndex(slot))
        await note(index_functions.open_slot(fleet, slot, generation))
    answers.append(slots)
    for n, slot in enumerate(slots):
        stores = [index_functions.store(fleet, slot, 1, hashes[: 10 * n])] if n else []
        stores += [index_functions.remove(fleet, slot, 1, hashes[10 * n - 1 : 10 * n - 4 : -1])]
        answers.append(await functions.run_all(link, stores))
        counters = EngineCounters(running_count=n, waiting_count=1, kv_usage_ratio=0.5)
        await note(make_heartbeat(fleet, slot, 1, counters=counters), lambda reply: reply[:3])
    answers.append(await depths(link, fleet))
    await note(reservations.register(fleet_id, ROUTER, begin=True), bool)
    candidates = np.array(
        [(s, 1, 1600 - 16 * n) for n, s in enumerate(slots)], reservations.CANDIDATE
    )
    for sequence in range(1, 5):
        await note(reservations.reserve(fleet_id, ROUTER, sequence, candidates))
    await note(reservations.prefilled(fleet_id, ROUTER, 1))
    await note(reservations.release(fleet_id, ROUTER, 2))
    book = reservations.sync_row(7, slots[3], 1, 99, 0, awaited=hashes[0])
    await note(reservations.sync(fleet_id, ROUTER, book, forget_tombstones=True))
    await note(reservations.await_block(fleet_id, ROUTER, 7, hashes[1]))
    await note(make_heartbeat(fleet, slots[3], 1, counters=None), lambda reply: reply[6:])
    await note(reservations.read(fleet_id), reserved)
    ended = make_heartbeat(fleet, slots[3], 1, counters=None, stored=hashes[1:2])
    await note(ended, lambda reply: reply[6:])
    await note(reservations.read(fleet_id), reserved)
    await note(reservations.reap(fleet_id, ROUTER))
    await note(reservations.read(fleet_id), reserved)
    await note(fleet_functions.close(fleet_id, slots[7], 1, -1))
    await note(index_functions.sweep(fleet, slots[7], 1, 0, 2**fleet.bucket_bits))
    await note(fleet_functions.free(fleet_id, slots[7], 1))
    answers.append(await depths(link, fleet))
    for partition in range(fleet.partitions):
        anchor = index_functions.anchor(fleet, partition)
        found = [key async for key in link.scan(anchor, keys.partition_pattern(anchor))]
        answers.append(sorted(found))
    return answers


def reserved(reply: Any) -> list[Any]:
    """Requests and tokens reserved on each slot."""
    counters = reservations.fleet_counters(reply)
    assert counters is not None
    return counters.slots[["reserved_requests", "reserved_prefill_tokens"]].tolist()


async def depths(link: Link, fleet: FleetRecord) -> list[int]:
    """Leading blocks of PROMPT by slot, over all partitions, for the first three of each."""
    hashes = b"".join(chain(fleet, PROMPT))
    calls = index_functions.lookups(fleet, hashes, together=link.has_all_keys)
    assert len(calls) == (1 if link.has_all_keys else fleet.partitions)
    out = np.zeros((fleet.partitions, SLOTS_PER_PARTITION_MAX), np.int64)
    index_functions.all_depths(calls, await functions.run_all(link, calls), out.reshape(-1))
    return out[:, :3].tolist()


async def test_a_cluster_answers_as_one_server_does(link: Link, redis_client, redis_socket) -> None:
    """Four partitions on three shards: the whole contract, answer by answer."""
    fleet = make_fleet_record(partitions=4)
    async with connected(f"unix://{redis_socket}", deadline_s=DEADLINE_S) as one:
        expected = await walkthrough(one, fleet)
    assert expected == await walkthrough(link, fleet)
    assert (
        len({key_slot(index_functions.anchor(fleet, p).encode()) * 3 // 16384 for p in range(4)})
        == 3
    )


async def test_answers_belong_to_their_commands(link: Link, cluster: RedisCluster) -> None:
    """Many callers at once, each with commands for every shard, get their answers in order."""
    names = [key_on(shard) for shard in range(3)]
    await link.execute([("SET", name, name) for name in names])

    async def ask(n: int) -> list[Any]:
        order = names[n % 3 :] + names[: n % 3]
        return await link.execute([("GET", name) for name in order] + [("ECHO", str(n))])

    answers = await asyncio.gather(*(ask(n) for n in range(300)))
    for n, answer in enumerate(answers):
        order = names[n % 3 :] + names[: n % 3]
        assert answer == [name.encode() for name in (*order, str(n))]


async def test_commands_of_one_call_do_not_wait_for_each_other(
    link: Link, cluster: RedisCluster
) -> None:
    """What goes to another node is executed while the first has not answered yet."""
    slow, other = key_on(0), key_on(1)
    task = asyncio.ensure_future(link.execute([("BLPOP", slow, 0), ("SET", other, "done")]))
    await until_equal(b"done", lambda: link.execute_command("GET", other))
    assert not task.done()
    async with connected(seed(cluster)) as second:
        await second.execute_command("RPUSH", slow, "go")
    assert await task == [[slow.encode(), b"go"], b"OK"]


async def test_a_server_that_refuses_keys_of_several_tags_gets_them_apart(
    cluster: RedisCluster,
) -> None:
    """A proxy before several servers looks like one server; so does one node of a cluster."""
    fleet = make_fleet_record(partitions=4)
    hashes = b"".join(chain(fleet, PROMPT))
    async with connected((await cluster.masters())[0].url) as link:
        assert link.has_all_keys
        with pytest.raises(ClusterCrossSlotError):
            await functions.run_all(link, index_functions.lookups(fleet, hashes, together=True))
        assert not link.has_all_keys


@pytest.mark.parametrize("read_replicas", [False, True])
async def test_a_call_costs_one_round_trip(cluster: RedisCluster, read_replicas: bool) -> None:
    """No node is asked for anything but the calls themselves; `hget` is the function's own."""
    fleet = make_fleet_record(partitions=4)
    hashes = b"".join(chain(fleet, PROMPT))
    calls = [index_functions.lookup(fleet, p, hashes) for p in range(4)]
    async with connected(cluster.url, read_replicas=read_replicas) as link:
        await functions.run_all(link, calls)
        before = await cluster.commands()
        for _ in range(50):
            await functions.run_all(link, calls)
        after = await cluster.commands()
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    upkeep = {"info", "cluster|slots", "ping", "hello", "client|setinfo", "replconf", "readonly"}
    assert {name for name, count in grown.items() if count} - upkeep == {"fcall_ro", "hget"}
    assert grown["fcall_ro"] == 200


async def test_a_shard_that_lacks_the_functions_gets_them(
    link: Link, cluster: RedisCluster
) -> None:
    """Also when the other shards have them: whoever misses one loads them everywhere."""
    fleet = make_fleet_record(partitions=3)
    calls = [index_functions.open_slot(fleet, SlotIndex(p * 256), 1) for p in range(3)]
    assert await functions.run_all(link, calls) == [1, 1, 1]
    for master in (await cluster.masters())[1:]:
        await master.ask("FUNCTION", "FLUSH")
    assert await functions.run_all(link, calls) == [1, 1, 1]
    for master in await cluster.masters():
        assert len(await master.ask("FUNCTION", "LIST")) == len(libraries.PARTS)


async def test_a_refusal_of_one_shard_is_raised_when_all_have_answered(link: Link) -> None:
    """The other commands are executed."""
    first, second = key_on(0), key_on(1)
    with pytest.raises(ResponseError, match="not an integer"):
        await link.execute([("SET", first, "x"), ("INCR", first), ("SET", second, "y")])
    assert await link.execute([("GET", first), ("GET", second)]) == [b"x", b"y"]


async def test_a_slot_that_moves_is_followed(link: Link, cluster: RedisCluster) -> None:
    """While it moves (ASK) and after it has (MOVED); then its key has another server."""
    key = key_on(0, "moving")
    slot = key_slot(key.encode())
    source, target, _ = await cluster.masters()
    before = link.server_of(key)
    assert await link.execute_command("SET", key, "old") == b"OK"
    ids = {one.port: (await one.ask("CLUSTER", "MYID")).decode() for one in (source, target)}
    await target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    await source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    await source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 1000)
    assert await link.execute([("GET", key), ("SET", key, "new")]) == [b"old", b"OK"]
    await settle_slot(slot, ids[target.port], target, source)
    assert await link.execute_command("GET", key) == b"new"
    assert before != link.server_of(key) == (await target.info("server"))["run_id"]
    await link.execute_command("DEL", key)
    await settle_slot(slot, ids[source.port], source, target)


async def settle_slot(slot: int, owner: str, *servers: RedisServer) -> None:
    """Give an empty slot, or one whose keys have moved, to a master."""
    for server in servers:
        await server.ask("CLUSTER", "SETSLOT", slot, "NODE", owner)


async def test_lookups_go_to_replicas_and_everything_else_to_masters(cluster: RedisCluster) -> None:
    """The answers are the masters'; without its replica a shard's master answers."""
    fleet = make_fleet_record(partitions=4)
    shards = await cluster.shards()
    async with connected(cluster.url, deadline_s=DEADLINE_S, read_replicas=True) as link:
        await functions.run(link, fleet_functions.create(fleet))
        for partition in range(4):
            slot = SlotIndex(partition * SLOTS_PER_PARTITION_MAX)
            await functions.run(link, index_functions.open_slot(fleet, slot, 1))
            stored = index_functions.store(fleet, slot, 1, chain(fleet, PROMPT)[: 10 + partition])
            assert await functions.run(link, stored) == 1
        expected = [[10 + p, 0, 0] for p in range(4)]
        await until_equal(expected, lambda: depths(link, fleet))  # the replicas follow
        before = [await lookups(shard) for shard in shards]
        assert expected == await depths(link, fleet)
        grown = [
            np.subtract(await lookups(s), b).tolist() for s, b in zip(shards, before, strict=True)
        ]
        assert sum(replica for _, replica in grown) == 4
        assert sum(master for master, _ in grown) == 0
        shards[1][1].kill()
        assert expected == await depths(link, fleet)


async def test_a_silent_replica_is_passed_over(cluster: RedisCluster) -> None:
    """One lookup may find out; those that follow go to the master and are not held up."""
    fleet = make_fleet_record()
    shards = await cluster.shards()
    async with connected(cluster.url, deadline_s=0.25, read_replicas=True) as link:
        await functions.load(link)
        lookup = index_functions.lookup(fleet, 0, b"".join(chain(fleet, PROMPT)))
        at = key_slot(index_functions.anchor(fleet, 0).encode()) * 3 // 16384

        async def replica_answers() -> bool:
            """The functions reach it a little later than its master."""
            _, before = await lookups(shards[at])
            assert await functions.run(link, lookup) == []
            _, after = await lookups(shards[at])
            return after > before

        await until(replica_answers, "its replica to answer")
        shards[at][1].pause()
        with pytest.raises(TimeoutError):
            await functions.run(link, lookup)
        for _ in range(20):
            assert await functions.run(link, lookup) == []
        shards[at][1].kill()


async def lookups(shard: list[RedisServer]) -> list[int]:
    """How often each server of a shard has looked something up."""
    stats = [await server.info("commandstats") for server in shard]
    return [int(stat.get("cmdstat_fcall_ro", {"calls": 0})["calls"]) for stat in stats]


@pytest.mark.parametrize(
    ("partitions", "above_mean_ratio"), [(3, 0.0), (4, 0.5), (12, 0.0), (16, 0.125)]
)
async def test_writes_are_as_even_as_partitions_allow(
    link: Link, cluster: RedisCluster, partitions: int, above_mean_ratio: float
) -> None:
    """Equal writes to every partition: the busiest of three shards is above the mean by so much."""
    fleet = make_fleet_record(partitions=partitions)
    masters = await cluster.masters()
    calls = [index_functions.open_slot(fleet, SlotIndex(p * 256), 1) for p in range(partitions)]
    await functions.run_all(link, calls)
    before = [await writes(master) for master in masters]
    for _ in range(10):
        await functions.run_all(link, calls)
    grown = np.subtract([await writes(master) for master in masters], before)
    assert grown.sum() == 10 * partitions
    assert grown.max() / grown.mean() - 1 == pytest.approx(above_mean_ratio)


async def writes(server: RedisServer) -> int:
    """How many functions that write it has executed."""
    stats = await server.info("commandstats")
    return int(stats.get("cmdstat_fcall", {"calls": 0})["calls"])


async def test_a_cluster_that_is_not_there_is_weather(tmp_path: Path) -> None:
    """The first attempt is waited for; then callers are told at once."""
    async with connected("redis+cluster://127.0.0.1:1", deadline_s=DEADLINE_S) as link:
        with pytest.raises(functions.REDIS_WEATHER, match="no connection"):
            await link.execute_command("GET", "key")


async def test_one_server_is_no_cluster(redis_client, tmp_path: Path) -> None:
    """A URL that says cluster of a server that is none: callers are told why."""
    with redis_server(tmp_path / "one") as server:
        await until(server.answers, "the server answers")
        url = server.url.replace("redis://", "redis+cluster://")
        async with connected(url, deadline_s=DEADLINE_S) as link:
            with pytest.raises(functions.REDIS_WEATHER, match="cluster support disabled"):
                await link.execute_command("GET", "key")
