"""A request on its way to an instance: its head, and a connection that takes it."""

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from indexer.contract.records import InstanceRecord
from router import headers as names
from router import telemetry
from router.instances.connections import Connections
from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import WEBSOCKET, Origin, request_head
from router.requests.api_call import ApiCall

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED: Final = HOP_BY_HOP | {
    "content-length",
    "expect",
    "host",
    names.RANK,
    names.REQUEST_ID,
    names.EXPLAIN,
    names.POLICY,
    names.ASKED_INSTANCES,
    names.PRIORITY,
}

_UPGRADE: Final = (("Connection", "Upgrade"), ("Upgrade", WEBSOCKET))

STALE_RETRIES_MAX: Final = 2
"""Kept-alive connections that the engine closed just before use, for one dispatch."""

_BODYLESS: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods whose requests need not have a body."""


class Sending:
    """One request on a connection; on another where a kept one turns out to be closed already."""

    def __init__(self, connections: Connections, instance: InstanceRecord, call: ApiCall) -> None:
        self.sent_s = time.monotonic()
        self._connections = connections
        self._call = call
        self._instance = instance
        self._connection: EngineConnection | None = None

    async def sent(self) -> EngineConnection:
        """The connection, when a byte of the answer is there or none will come.

        Raises:
            OSError, ValueError: no connection, or it broke.
        """
        call, origin = self._call, _origin(self._instance.url)
        headers = end_to_end(call.headers, _NOT_FORWARDED)
        headers.append((names.REQUEST_ID, call.request_id))
        if self._instance.data_parallel_rank is not None:
            headers.append((names.RANK, str(self._instance.data_parallel_rank)))
        if call.upgrades:
            headers += _UPGRADE
        bodyless = not call.body and call.method in _BODYLESS
        length = None if bodyless else len(call.body)
        head = request_head(
            call.method, origin.prefix + call.path, origin.authority, headers, length
        )
        for stale_retries_left in range(STALE_RETRIES_MAX, -1, -1):
            connection = self._connection = await self._connections.take(origin)
            connection.send(
                head, call.body, to_head=call.method == "HEAD", to_upgrade=call.upgrades
            )
            self.sent_s = time.monotonic()
            try:
                await connection.head()
            except OSError:
                stale = connection.reused and not connection.began
                if not stale or not stale_retries_left:
                    raise
                connection.abort()
                telemetry.STALE_CONNECTIONS.inc()
            else:
                break
        assert self._connection is not None
        return self._connection

    def end(self) -> None:
        """The connection is kept for others if its answer is complete, else closed."""
        if self._connection is not None:
            self._connections.give(self._connection)


def end_to_end(
    headers: Iterable[tuple[str, str]], excluded: frozenset[str]
) -> list[tuple[str, str]]:
    """Headers that concern the other end, without those that `Connection` names."""
    kept: list[tuple[str, str]] = []
    named: set[str] = set()
    for name, value in headers:
        lowered = name.lower()
        if lowered == "connection" and value.lower() not in {"keep-alive", "close"}:
            named |= {token.strip().lower() for token in value.split(",")}
        if lowered not in excluded:
            kept.append((name, value))
    return [pair for pair in kept if pair[0].lower() not in named] if named else kept


_origin = lru_cache(maxsize=4096)(Origin.of)
