"""The one way to Redis, for routers and sidecars: one server, the master of several, a cluster.

`connected` yields a `Link`. Commands of all callers share one connection per server, in order.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from indexer.contract.functions import Command
from indexer.contract.link import address as addresses
from indexer.contract.link.cluster_link import ClusterLink
from indexer.contract.link.server_link import ServerLink


class Link(Protocol):
    """A connection, or as many as it takes, that heals itself. Commands are sent once."""

    @property
    def has_all_keys(self) -> bool:
        """Whether one server has them all: one command may name keys of several hash tags."""
        ...

    async def execute_command(self, *command: bytes | str | float) -> Any:
        """One command, one answer, bytes undecoded.

        Raises:
            ResponseError: Redis refused the command.
            ConnectionError: there is no connection, or it broke before the answer came.
            TimeoutError: the link's deadline has passed.
        """
        ...

    async def execute(self, commands: Iterable[Command]) -> list[Any]:
        """Several commands in one write per server, their answers in order.

        Raises:
            ResponseError: Redis refused one of them; the others were executed.
            ConnectionError: there is no connection, or it broke before the answers came.
            TimeoutError: the link's deadline has passed.
        """
        ...

    def scan(self, anchor: str, pattern: str) -> AsyncIterator[bytes]:
        """Keys that match a pattern, by pages, on the server that has the anchor's slot.

        Raises:
            RedisError, OSError, TimeoutError: as `execute_command`; each page has the deadline.
        """
        ...

    def server_of(self, key: str) -> str | None:
        """Run id of the server that answers for a key now; None when nobody does.

        Another one than before (failover, restart) may have lost the last writes.
        """
        ...

    async def run(self) -> None:
        """Connect, and connect again, until cancelled; `connected` has it run."""
        ...


@asynccontextmanager
async def connected(
    url: str, *, deadline_s: float | None = None, read_replicas: bool = False
) -> AsyncIterator[Link]:
    """A link, alive within the context.

    Args:
        url: see `address.py`.
        deadline_s: after which each call raises TimeoutError by itself; None when callers have
            theirs.
        read_replicas: of a cluster: lookups go to replicas where possible.

    Raises:
        ValueError: the URL cannot be understood.
    """
    where = addresses.parse(url)
    link: ServerLink | ClusterLink
    if where.topology is addresses.Topology.CLUSTER:
        link = ClusterLink(where, deadline_s=deadline_s, read_replicas=read_replicas)
    else:
        link = ServerLink(where, deadline_s=deadline_s)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="redis_link")
        try:
            yield link
        except Exception as error:  # noqa: BLE001 - raised again outside of the group
            failure = error
        finally:
            running.cancel()
    if failure is not None:
        raise failure
