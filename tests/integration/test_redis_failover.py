"""Redis fails over under traffic: whoever uses the link goes on by itself."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from builders import make_fleet_record
from fleets import chain
from redis.crc import key_slot
from redis.exceptions import ReadOnlyError
from redis_servers import RedisCluster, RedisServer, redis_server
from waiting import until, until_equal

from indexer.contract import functions, index_functions, keys
from indexer.contract.identifiers import SlotIndex
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from indexer.contract.link import connected

pytestmark = pytest.mark.integration

DEADLINE_S = 0.5
RECOVERY_S = 20.0
"""For the servers to agree on another master, which they do within seconds, and the link to see."""

PROMPT = list(range(160))


class Traffic:
    """One caller after the other, for as long as the context lasts."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self.in_a_row = 0
        self.failed = 0
        self.outage_s = 0.0
        self._succeeded_s = time.monotonic()

    async def run(self) -> None:
        """Call again and again; only weather may happen."""
        while True:
            try:
                await self._call()
            except functions.REDIS_WEATHER:
                self.failed += 1
                self.in_a_row = 0
            else:
                now_s = time.monotonic()
                self.outage_s = max(self.outage_s, now_s - self._succeeded_s)
                self._succeeded_s = now_s
                self.in_a_row += 1
            await asyncio.sleep(0.005)

    async def goes_on(self) -> None:
        """Wait until calls succeed one after the other."""
        self.in_a_row = 0
        await until(lambda: self.in_a_row >= 20, "calls succeed", RECOVERY_S)


@asynccontextmanager
async def traffic(call: Callable[[], Awaitable[object]]) -> AsyncIterator[Traffic]:
    """Calls that go on beside the test."""
    running = Traffic(call)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(running.run())
        await running.goes_on()
        yield running
        task.cancel()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("read_replicas", [False, True])
async def test_a_shard_fails_over_under_traffic(
    cluster: RedisCluster, how: signal.Signals, read_replicas: bool
) -> None:
    """Its master is killed, or hangs: the replica takes over with what it has, traffic goes on."""
    fleet = make_fleet_record(partitions=3)
    slots = [SlotIndex(p * SLOTS_PER_PARTITION_MAX) for p in range(3)]
    hashes = chain(fleet, PROMPT)
    (master, replica), *_ = await cluster.shards()
    async with connected(cluster.url, deadline_s=DEADLINE_S, read_replicas=read_replicas) as link:
        opens = [index_functions.open_slot(fleet, slot, 1) for slot in slots]
        assert await functions.run_all(link, opens) == [1, 1, 1]
        stores = [index_functions.store(fleet, slot, 1, hashes) for slot in slots]
        lookups = [index_functions.lookup(fleet, p, b"".join(hashes)) for p in range(3)]
        run_id = (await master.info("server"))["run_id"]
        anchors = [index_functions.anchor(fleet, p) for p in range(3)]
        await functions.run_all(link, stores)
        await until_equal(  # replicas follow
            [[10, b"\0"]] * 3, lambda: functions.run_all(link, lookups)
        )
        (lost,) = [anchor for anchor in anchors if link.server_of(anchor) == run_id]

        async def call() -> None:
            assert await functions.run_all(link, stores + lookups) == [1] * 3 + [[10, b"\0"]] * 3

        async with traffic(call) as running:
            assert master.process is not None
            master.process.send_signal(how)
            new_run_id = (await replica.info("server"))["run_id"]
            await until(lambda: link.server_of(lost) == new_run_id, "the replica leads", RECOVERY_S)
            await running.goes_on()
            assert running.failed
            assert running.outage_s < RECOVERY_S / 2
        if how is signal.SIGSTOP:
            master.process.send_signal(signal.SIGCONT)


async def test_a_partition_moves_to_another_shard_under_traffic(cluster: RedisCluster) -> None:
    """Atomic slot migration there and back: every call is answered, by the one or the other."""
    fleet = make_fleet_record()
    hashes, anchor = chain(fleet, PROMPT), index_functions.anchor(fleet, 0)
    slot = key_slot(anchor.encode())
    shards = await cluster.shards()
    at = slot * len(shards) // 16384
    source, target = shards[at][0], shards[at - 1][0]
    async with connected(cluster.url, deadline_s=10 * DEADLINE_S) as link:
        calls = [
            index_functions.open_slot(fleet, SlotIndex(0), 1),
            index_functions.store(fleet, SlotIndex(0), 1, hashes),
            index_functions.lookup(fleet, 0, b"".join(hashes)),
        ]

        async def call() -> None:
            assert await functions.run_all(link, calls) == [1, 1, [10, b"\0"]]

        async with traffic(call) as running:
            for giver, taker in ((source, target), (target, source)):
                to = (await taker.ask("CLUSTER", "MYID")).decode()
                await giver.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", to)
                run_id = (await taker.info("server"))["run_id"]
                await until_equal(run_id, partial(link.server_of, anchor))
                await running.goes_on()
            assert not running.failed
        found = [key async for key in link.scan(anchor, keys.partition_pattern(anchor))]
        assert len(found) > 1


@pytest.mark.parametrize("how", ["killed", "demoted"])
async def test_of_several_servers_the_master_is_used(tmp_path: Path, how: str) -> None:
    """A replica is promoted, the master killed or made a replica: the other one is found."""
    with redis_server(tmp_path / "a") as first, redis_server(tmp_path / "b") as second:
        await until(first.answers, "the first answers")
        await until(second.answers, "the second answers")
        await second.ask("REPLICAOF", "127.0.0.1", first.port)
        url = f"redis://127.0.0.1:{second.port},127.0.0.1:{first.port}"
        async with (
            connected(url, deadline_s=DEADLINE_S) as link,
            traffic(lambda: link.execute_command("INCR", "n")) as running,
        ):
            before = link.server_of("n")
            assert before == (await first.info("server"))["run_id"]
            await second.ask("REPLICAOF", "NO", "ONE")
            if how == "killed":
                first.kill()
            else:
                await first.ask("REPLICAOF", "127.0.0.1", second.port)
            await until(lambda: link.server_of("n") not in {None, before}, "another master")
            await running.goes_on()
            assert link.server_of("n") == (await second.info("server"))["run_id"]


async def test_a_lone_replica_is_read_and_refuses_writes(tmp_path: Path) -> None:
    """With one server in the URL nobody else could be the master: its refusal is handed on."""
    with redis_server(tmp_path / "a") as server:
        await until(server.answers, "the server answers")
        await server.ask("REPLICAOF", "127.0.0.1", 1)
        async with connected(server.url, deadline_s=DEADLINE_S) as link:
            run_id = link.server_of("n")
            with pytest.raises(ReadOnlyError):
                await link.execute_command("INCR", "n")
            assert await link.execute_command("GET", "n") is None
            assert link.server_of("n") == (await server.info("server"))["run_id"] != run_id


async def test_a_restarted_server_is_another_one(tmp_path: Path) -> None:
    """Same address, nothing of what it had: its identity tells."""
    with redis_server(tmp_path / "a") as server:
        await until(server.answers, "the server answers")
        async with connected(server.url, deadline_s=DEADLINE_S) as link:
            await link.execute_command("PING")
            before = link.server_of("n")
            server.kill()
            await until_equal(None, lambda: link.server_of("n"))
            server.start()
            await until(lambda: link.server_of("n"), "a new connection")
            assert before != link.server_of("n")


async def test_sentinel_names_the_new_master(tmp_path: Path) -> None:
    """The master is killed; Sentinel promotes its replica, and callers go on there."""
    with ExitStack() as stack:
        first = stack.enter_context(redis_server(tmp_path / "a"))
        second = stack.enter_context(redis_server(tmp_path / "b"))
        await until(first.answers, "the first answers")
        await until(second.answers, "the second answers")
        await second.ask("REPLICAOF", "127.0.0.1", first.port)
        await until(lambda: is_online(first), "the replica is online")
        sentinel = stack.enter_context(sentinel_of(tmp_path / "s", first))
        await until(sentinel.answers, "Sentinel answers")
        await until(lambda: knows_replica(sentinel), "Sentinel knows the replica", RECOVERY_S)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main"
        async with (
            connected(url, deadline_s=DEADLINE_S) as link,
            traffic(lambda: link.execute_command("INCR", "n")) as running,
        ):
            before = link.server_of("n")
            first.kill()
            await until(lambda: link.server_of("n") not in {None, before}, "another", RECOVERY_S)
            await running.goes_on()
            assert link.server_of("n") == (await second.info("server"))["run_id"]


async def is_online(master: RedisServer) -> bool:
    """Whether a master has a replica that is up to date."""
    slaves = await master.info("replication")
    return "slave0" in slaves and slaves["slave0"]["state"] == "online"


async def knows_replica(sentinel: RedisServer) -> bool:
    """Whether Sentinel has found the master's replica."""
    return bool(await sentinel.ask("SENTINEL", "REPLICAS", "main"))


def sentinel_of(folder: Path, master: RedisServer):
    """A Sentinel that watches a master by itself."""
    folder.mkdir()
    (folder / "sentinel.conf").write_text(
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 500\n"
        "sentinel failover-timeout main 3000\n"
    )
    return redis_server(folder, "--sentinel", config=folder / "sentinel.conf")
