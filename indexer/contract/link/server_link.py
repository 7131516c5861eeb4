"""The link to one server: the one named, the master of several, or the one that Sentinel names.

Of several servers, the first in the URL that says it is the master is used: a former master has to
come back as a replica (managed services and Sentinel see to that).
"""

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from redis.exceptions import ClusterCrossSlotError
from redis.exceptions import ConnectionError as RedisConnectionError

from indexer.contract.functions import REDIS_WEATHER, Command
from indexer.contract.link import wire
from indexer.contract.link.address import Address, Server, Topology
from indexer.contract.link.deadline import DeadlineLink
from indexer.contract.link.wire import Opened, Wire

HELLO: Final = ("INFO", "server", "replication")
"""Tells which process answers and whether it is a master."""


class ServerLink(DeadlineLink):
    """A multiplexed connection that heals itself; `run` must be running.

    Args:
        address: one server or several, or Sentinels.
        deadline_s: after which a call raises TimeoutError by itself; None when callers have theirs.
    """

    def __init__(self, address: Address, *, deadline_s: float | None) -> None:
        self._address = address
        super().__init__(deadline_s=deadline_s)
        self._wire = Wire()
        self.has_all_keys = True
        self._has_to_be_master = address.topology is Topology.SENTINEL or len(address.servers) > 1

    async def _execute(self, commands: Iterable[Command]) -> list[Any]:
        """In one write."""
        if not self._wire.tried.is_set():  # the very first connection is worth waiting for
            await self._wire.tried.wait()
        try:
            return await wire.gathered(self._wire.submit(commands))
        except ClusterCrossSlotError:  # a proxy before several servers, or one of them
            self.has_all_keys = False
            raise

    def scan(self, anchor: str, pattern: str) -> AsyncIterator[bytes]:
        """Keys by pattern; see `Link`."""
        del anchor  # every key is on the one server

        async def ask(command: Command) -> Any:
            return await self.execute_command(*command)

        return wire.scanned(ask, pattern)

    def server_of(self, key: str) -> str | None:
        """The server's run id; see `Link`."""
        del key
        return self._wire.run_id

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await self._wire.keep(self._connect, master_only=self._has_to_be_master)

    async def _connect(self) -> Opened:
        """A connection to the server that is to be talked to now.

        Raises:
            RedisError, OSError, TimeoutError: there is none; of several attempts the last one's.
        """
        failed: BaseException = RedisConnectionError("no server is named")
        for place in self._address.servers or (None,):
            try:
                is_sentinel = self._address.topology is Topology.SENTINEL
                server = await self._named_by(place) if place and is_sentinel else place
                return await self._open(server)
            except REDIS_WEATHER as error:
                failed = error
        raise failed

    async def _open(self, server: Server | None) -> Opened:
        """A connection to a server, if it may be talked to."""
        connection, (said,) = await wire.connect(self._address.url_of(server), HELLO)
        info = wire.info(said)
        if self._has_to_be_master and info.get("role") != "master":
            await wire.close(connection)
            raise RedisConnectionError(f"{server} is no master but {info.get('role', said)}")
        place = str(server or "unix socket")
        return Opened(connection=connection, server=place, run_id=info.get("run_id"))

    async def _named_by(self, sentinel: Server) -> Server:
        """The master, by one Sentinel.

        Raises:
            RedisError, OSError, TimeoutError: it does not answer, or does not know.
        """
        service = self._address.service or ""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        connection, (said,) = await wire.connect(self._address.url_of_sentinel(sentinel), question)
        await wire.close(connection)
        if not isinstance(said, list):
            raise RedisConnectionError(f"Sentinel {sentinel} knows no {service!r} ({said})")
        return Server(said[0].decode(), int(said[1]))
