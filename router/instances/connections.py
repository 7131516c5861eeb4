"""Connections to engines, kept for the next request while they are fresh."""

import asyncio
import ssl
from collections import deque
from typing import Final

from router.instances import vanishing
from router.instances.engine_connection import (
    ConnectTimedOut,
    EngineConnection,
    EngineUnreachable,
)
from router.instances.http_wire import Origin

IDLE_CONNECTIONS_MAX: Final = 1024
"""Kept for one instance; those beyond are closed after their request."""


class Connections:
    """Connections to all instances, idle ones by origin; the last one used goes first.

    In use they are bounded by admission, idle by `IDLE_CONNECTIONS_MAX` and by age.

    Args:
        connect_timeout_s: for a new connection, the look-up of a name included.
        keepalive_s: an idle connection is closed after this.
        tls: for https; None: with the system's authorities.
    """

    def __init__(
        self, *, connect_timeout_s: float, keepalive_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._idle: dict[Origin, deque[EngineConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._tls = tls

    async def take(self, origin: Origin) -> EngineConnection:
        """An idle connection, or a new one.

        Raises:
            EngineUnreachable, ConnectTimedOut.
        """
        loop = asyncio.get_running_loop()
        idle = self._idle.get(origin)
        while idle:
            kept = idle.pop()
            if kept.fresh and loop.time() - kept.idle_since_s < self._keepalive_s:
                return kept
            kept.abort()
        if origin.tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, made = await loop.create_connection(
                    lambda: EngineConnection(origin, loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError as error:
            raise ConnectTimedOut from error
        except (OSError, ValueError) as error:
            raise EngineUnreachable(str(error)) from error
        vanishing.watch(transport.get_extra_info("socket"))
        return made

    def give(self, connection: EngineConnection) -> None:
        """Back after its exchange: kept if it is good for another one, else closed."""
        kept = len(self._idle.get(connection.origin, ()))
        if not connection.reusable or self._closed or kept >= IDLE_CONNECTIONS_MAX:
            connection.abort()
            return
        connection.put_back()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweep is None:
            self._arm(self._keepalive_s)

    def close(self) -> None:
        """Close all that are idle, now and later."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    def _arm(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(delay_s, self._close_old, loop)

    def _close_old(self, loop: asyncio.AbstractEventLoop) -> None:
        """The oldest stand in front."""
        self._sweep = None
        oldest_s = loop.time() - self._keepalive_s
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since_s <= oldest_s or not idle[0].fresh):
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._arm(self._keepalive_s / 4)
