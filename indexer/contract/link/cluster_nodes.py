"""The nodes of a cluster: who has which slot, and one multiplexed connection to each.

The map is read again when a node refuses (MOVED), is gone, or is silent, and now and then anyway.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Final

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from indexer.contract.functions import REDIS_WEATHER, Command
from indexer.contract.link import wire
from indexer.contract.link.address import Address, Server
from indexer.contract.link.slots import Shard, SlotMap
from indexer.contract.link.wire import Opened, Wire

log = structlog.get_logger()

REFRESH_S: Final = 5.0
"""Between two readings of the map while all is well."""

TROUBLED_REFRESH_S: Final = 0.25
"""The same while a master is gone or silent, or after a refusal; a failover takes seconds."""

WATCH_S: Final = 0.05
ASK_MAP_S: Final = 1.0
SILENCE_S: Final = 0.25
"""A master whose oldest command has waited this long may be gone: its shard may have another."""

REPLICA_PATIENCE_S: Final = 0.05
"""A replica whose oldest lookup has waited this long is passed over."""

FORWARDED_KEPT_S: Final = 60.0
"""How long a node that is in no map (it is being given its first slots) is kept connected."""

READ_MAP: Final = ("CLUSTER", "SLOTS")


class Node:
    """One server of the cluster and the connection to it.

    Attributes:
        server: where it is.
        wire: the connection.
        is_current: as a replica, whether it follows its master.
        needed_s: when somebody was last sent there, on the monotonic clock.
        task: keeps the connection.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wire = Wire()
        self.is_current = False
        self.needed_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None

    @property
    def answers_lookups(self) -> bool:
        """Whether it may be asked as a replica."""
        return self.is_current and self.wire.is_up and self.wire.waited_s() < REPLICA_PATIENCE_S


class ClusterNodes:
    """Map and connections that heal themselves; `run` must be running.

    Args:
        address: nodes of the cluster; any of them that answers is enough.
        with_replicas: connect to replicas too, for reading.

    Attributes:
        map: who has which slot, as last read.
        is_stale: set by whoever was refused: the map is read again soon.
        tried: set once the first attempt has ended, however.
        error: why the map could not be read last time.
    """

    def __init__(self, address: Address, *, with_replicas: bool) -> None:
        self.map = SlotMap()
        self.is_stale = False
        self.tried = asyncio.Event()
        self.error: BaseException | None = None
        self._address = address
        self._with_replicas = with_replicas
        self._nodes: dict[Server, Node] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._turns = itertools.count()

    # -- who is asked -----------------------------------------------------------------------------

    def named(self, server: Server) -> Node:
        """The node of a server, from now on connected.

        Raises:
            ConnectionError: the link has ended.
        """
        node = self._nodes.get(server)
        if node is None:
            if self._tasks is None:
                raise RedisConnectionError("the link to Redis has ended")
            node = self._nodes[server] = Node(server)
            node.task = self._tasks.create_task(
                node.wire.keep(lambda: self._open(node)), name=f"redis_node {server}"
            )
        node.needed_s = time.monotonic()
        return node

    def master_of(self, slot: int) -> Node:
        """Who answers for a slot.

        Raises:
            ConnectionError: nobody is known to.
        """
        shard = self.map.shard(slot)
        if shard is None:
            self.is_stale = True
            raise RedisConnectionError(f"no connection to Redis for slot {slot} ({self.reason()})")
        return self.named(shard.master)

    def replica_of(self, slot: int) -> Node | None:
        """A replica that can be asked about a slot; in turns. None when there is none."""
        shard = self.map.shard(slot)
        able = [node for node in self._replicas(shard) if node.answers_lookups] if shard else []
        return able[next(self._turns) % len(able)] if able else None

    def any_master(self) -> Node:
        """A master that is connected.

        Raises:
            ConnectionError: none is.
        """
        for node in self._masters():
            if node.wire.is_up:
                return node
        raise RedisConnectionError(f"no connection to Redis ({self.reason()})")

    def reason(self) -> str:
        """Why there may be no connection."""
        return str(self.error or "a node is not connected")

    def run_id_of(self, slot: int) -> str | None:
        """The server process that answers for a slot now."""
        shard = self.map.shard(slot)
        node = self._nodes.get(shard.master) if shard is not None else None
        return node.wire.run_id if node is not None else None

    def _masters(self) -> Iterator[Node]:
        return (self._nodes[s.master] for s in self.map.shards if s.master in self._nodes)

    def _replicas(self, shard: Shard) -> Iterator[Node]:
        return (self._nodes[server] for server in shard.replicas if server in self._nodes)

    # -- keeping map and connections --------------------------------------------------------------

    async def run(self) -> None:
        """Keep them until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    while True:
                        await self._refresh()
                        await self._until_due()
                finally:
                    self._tasks = None  # it takes no more tasks
        finally:
            self.tried.set()

    async def _until_due(self) -> None:
        """Wait until the map is to be read again."""
        read_s = time.monotonic()
        while (waited_s := time.monotonic() - read_s) < REFRESH_S:
            if waited_s >= TROUBLED_REFRESH_S and self._is_troubled():
                return
            await asyncio.sleep(WATCH_S)

    def _is_troubled(self) -> bool:
        if self.is_stale or not self.map.is_whole:
            return True
        return any(
            not node.wire.is_up or node.wire.waited_s() > SILENCE_S for node in self._masters()
        )

    async def _refresh(self) -> None:
        """Read the map from whoever answers, and connect to the nodes in it."""
        try:
            self.map = await self._read_map()
        except REDIS_WEATHER as error:
            if self.error is None:
                log.warning("redis_cluster_unreadable", error=str(error))
            self.error = error
        else:
            self.error, self.is_stale = None, False
            self._connect_nodes()
            if self._with_replicas:
                await self._check_replicas()
        if not self.tried.is_set():
            for node in list(self._nodes.values()):
                await node.wire.tried.wait()
            self.tried.set()

    async def _read_map(self) -> SlotMap:
        """What the first node says that answers: connected masters in turn, then any known node.

        Raises:
            ConnectionError: none answers.
        """
        failed: BaseException = RedisConnectionError("no node is named")
        up = [n for n in self._masters() if n.wire.is_up and n.wire.waited_s() < SILENCE_S]
        turn = next(self._turns) % max(1, len(up))
        for node in up[turn:] + up[:turn]:
            try:
                async with asyncio.timeout(ASK_MAP_S):
                    (reply,) = await wire.gathered(node.wire.submit((READ_MAP,)))
                return SlotMap.of(reply, node.server)
            except (*REDIS_WEATHER, ValueError) as error:
                failed = error
        known = (server for s in self.map.shards for server in (s.master, *s.replicas))
        for server in dict.fromkeys((*known, *self._address.servers)):
            try:
                connection, (said,) = await wire.connect(self._address.url_of(server), READ_MAP)
                await wire.close(connection)
                if isinstance(said, ResponseError):
                    failed = said
                    continue
                return SlotMap.of(said, server)
            except (*REDIS_WEATHER, ValueError) as error:
                failed = error
        raise RedisConnectionError(f"no node tells the slots: {failed}") from failed

    def _connect_nodes(self) -> None:
        """A connection for every node that commands go to, none for others."""
        for shard in self.map.shards:
            self.named(shard.master)
            for replica in shard.replicas if self._with_replicas else ():
                self.named(replica)
        for server, node in list(self._nodes.items()):
            if time.monotonic() - node.needed_s > FORWARDED_KEPT_S and node.task is not None:
                del self._nodes[server]
                node.task.cancel()

    async def _open(self, node: Node) -> Opened:
        """A connection to a node; where replicas are read, one that may read a replica."""
        hello: list[Command] = [("INFO", "server", "replication")]
        if self._with_replicas:
            hello.append(("READONLY",))
        connection, said = await wire.connect(self._address.url_of(node.server), *hello)
        info = wire.info(said[0])
        node.is_current = _follows(info)
        return Opened(connection=connection, server=str(node.server), run_id=info.get("run_id"))

    async def _check_replicas(self) -> None:
        """Find out which replicas have lost their master: they would go on with what they had."""
        question = (("INFO", "replication"),)
        asked = [
            (node, node.wire.submit(question))
            for shard in self.map.shards
            for node in self._replicas(shard)
            if node.wire.is_up
        ]
        for node, futures in asked:
            is_current = False
            with contextlib.suppress(*REDIS_WEATHER):
                async with asyncio.timeout(ASK_MAP_S):
                    is_current = _follows(wire.info((await wire.gathered(futures))[0]))
            node.is_current = is_current


def _follows(info: Mapping[str, str]) -> bool:
    """Whether what a replica says of itself lets it be asked; a master has no such field."""
    return info.get("master_link_status", "up") == "up"
