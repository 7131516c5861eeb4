"""The link to a cluster: every command goes straight to the node that has its key.

A pooled cluster client asks a server where the keys of a function call are, before each call. Here
the place of the key is known, so a call costs one round trip, and what one caller sends to several
nodes is on its way to all of them at once.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from indexer.contract import libraries
from indexer.contract.functions import Command
from indexer.contract.index_functions import LOOKUP
from indexer.contract.link import wire
from indexer.contract.link.address import Address, Server
from indexer.contract.link.cluster_nodes import ClusterNodes, Node
from indexer.contract.link.deadline import DeadlineLink
from indexer.contract.link.slots import host_of, slot_of, slot_of_key

SENDINGS_MAX: Final = 5
"""How often one command is sent: first where the map says, then wherever a node sends it on."""


class _Sending:
    """One command on its way to an answer."""

    __slots__ = ("at", "command", "failure", "futures", "is_for_replica", "reply", "via")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.futures: Sequence[asyncio.Future[Any]] = ()
        self.at: Node | None = None  # to whom it was sent last
        self.via: AskError | None = None  # what that one said: elsewhere
        self.is_for_replica = False
        self.reply: Any = None
        self.failure: ResponseError | RedisConnectionError | None = None


class ClusterLink(DeadlineLink):
    """Connections to all masters that heal themselves; `run` must be running.

    Args:
        address: nodes of the cluster; any of them that answers is enough.
        deadline_s: after which a call raises TimeoutError by itself; None when callers have theirs.
        read_replicas: send lookups to replicas, and to the master where none can be had.
    """

    def __init__(self, address: Address, *, deadline_s: float | None, read_replicas: bool) -> None:
        super().__init__(deadline_s=deadline_s)
        self._read_replicas = read_replicas
        self._nodes = ClusterNodes(address, with_replicas=read_replicas)

    @property
    def has_all_keys(self) -> bool:
        """Never; see `Link`."""
        return False

    async def _execute(self, commands: Iterable[Command]) -> list[Any]:
        """One write per node; FUNCTION goes to every master."""
        if not self._nodes.tried.is_set():  # the very first connections are worth waiting for
            await self._nodes.tried.wait()
        sendings = [_Sending(command) for command in commands]
        if self._read_replicas:
            for sending in sendings:
                sending.is_for_replica = sending.command[1:2] == (libraries.server_names()[LOOKUP],)
        pending = sendings
        for _ in range(SENDINGS_MAX):
            for sending in pending:  # all are on their way before the first answer is awaited
                try:
                    await self._send(sending)
                except RedisConnectionError as error:
                    sending.failure = error
            pending = [sending for sending in pending if not await self._is_settled(sending)]
            if not pending:
                return _replies(sendings)
        for sending in pending:
            sending.failure = RedisConnectionError(f"sent on {SENDINGS_MAX} times: {sending.via}")
        return _replies(sendings)

    async def _send(self, sending: _Sending) -> None:
        """Append a command to the connection of whoever is to answer it.

        Raises:
            ConnectionError: there is no connection.
        """
        command, via, sending.futures = sending.command, sending.via, ()
        if via is not None:
            sending.at = await self._named_by(via, sending.at)
            asking = () if isinstance(via, MovedError) else (("ASKING",),)
            sending.futures = sending.at.wire.submit((*asking, command))
        elif command[0] == "FUNCTION":
            self._send_to_every_master(sending)
        else:
            sending.at = self._node_for(command, is_for_replica=sending.is_for_replica)
            sending.futures = sending.at.wire.submit((command,))

    def _node_for(self, command: Command, *, is_for_replica: bool) -> Node:
        slot = slot_of(command)
        if slot is None:
            return self._nodes.any_master()
        replica = self._nodes.replica_of(slot) if is_for_replica else None
        return replica or self._nodes.master_of(slot)

    def _send_to_every_master(self, sending: _Sending) -> None:
        masters = [self._nodes.named(shard.master) for shard in self._nodes.map.shards]
        up = [node for node in masters if node.wire.is_up]
        sending.futures = [f for node in up for f in node.wire.submit((sending.command,))]
        if len(up) < len(masters) or not masters:
            sending.failure = RedisConnectionError(
                f"no connection to Redis ({self._nodes.reason()})"
            )

    async def _named_by(self, via: AskError, at: Node | None) -> Node:
        """The node that a refusal names; one without a host is on the host of who refused."""
        assert at is not None, "whoever refused was asked"
        server = Server(host_of(via.host, at.server), int(via.port))
        if isinstance(via, MovedError):
            self._nodes.map.move(int(via.slot_id), server)
        node = self._nodes.named(server)
        await node.wire.tried.wait()
        return node

    async def _is_settled(self, sending: _Sending) -> bool:
        """Await a command's answer; False when another node is to be asked."""
        try:
            for future in sending.futures:  # several: of every master, or ASKING's own first
                sending.reply = await future
        except (ResponseError, RedisConnectionError) as error:
            self._nodes.is_stale |= isinstance(error, ClusterDownError | MovedError)
            if isinstance(error, AskError):
                sending.via = error
                return False
            if sending.is_for_replica:  # whatever it was, the master may do better
                sending.is_for_replica, sending.via = False, None
                return False
            sending.failure = error
        return True

    def scan(self, anchor: str, pattern: str) -> AsyncIterator[bytes]:
        """Keys by pattern; see `Link`. A cursor is good on one node only, so no other is asked."""
        begun_at: list[Node] = []

        async def ask(command: Command) -> Any:
            async with asyncio.timeout(self._deadline_s):
                if not self._nodes.tried.is_set():
                    await self._nodes.tried.wait()
                node = self._nodes.master_of(slot_of_key(anchor))
                begun_at.append(node)
                if node is not begun_at[0]:
                    raise RedisConnectionError("the keys have another master since the scan began")
                (reply,) = await wire.gathered(node.wire.submit((command,)))
            return reply

        return wire.scanned(ask, pattern)

    def server_of(self, key: str) -> str | None:
        """Run id of the master that has a key; see `Link`."""
        return self._nodes.run_id_of(slot_of_key(key))

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await self._nodes.run()


def _replies(sendings: Sequence[_Sending]) -> list[Any]:
    """All answers; a break is raised rather than a refusal, for it says that not all was done."""
    failures = [sending.failure for sending in sendings if sending.failure is not None]
    for failure in failures:
        if not isinstance(failure, ResponseError):
            raise failure
    if failures:
        raise failures[0]
    return [sending.reply for sending in sendings]
