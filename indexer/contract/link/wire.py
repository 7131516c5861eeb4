"""One connection to one server: commands of many callers share it, in order.

A pooled client takes a connection for each command, and a cancelled command costs a connection. A
decision sends three commands and clients leave at any moment, so here commands are appended to one
stream and answered in order; a caller that stops waiting leaves nothing behind. What is sent in one
turn of the event loop goes out in one write: uvloop sees to that. Connecting, TLS and
authentication are redis-py's.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import hiredis
import structlog
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from indexer.contract.functions import REDIS_WEATHER, Command
from indexer.contract.link.line import Line

log = structlog.get_logger()

CONNECT_TIMEOUT_S: Final = 2.0
RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 1.0
"""Thousands of clients must not keep a server from starting."""

STALL_S: Final = 5.0
"""A connection whose oldest command has waited this long is given up."""

WAITING_MAX: Final = 65_536
"""Commands without an answer; beyond, the server counts as gone."""

SCAN_KEYS_PER_PAGE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A fresh connection.

    Attributes:
        connection: redis-py's, past its handshake.
        server: where to, for the log.
        run_id: of the server process; None when it does not say.
    """

    connection: Any
    server: str
    run_id: str | None


class Wire:
    """What is sent to one server, and who waits for the answers; may connect again and again.

    Attributes:
        run_id: the server process at the other end; None while there is none, or it does not say.
        error: why it is not up.
        tried: set once the first attempt to connect has ended, however.
    """

    def __init__(self) -> None:
        self.tried = asyncio.Event()
        self.run_id: str | None = None
        self.error: BaseException | None = None
        self._line: Line | None = None

    @property
    def is_up(self) -> bool:
        """Whether commands are taken."""
        return self._line is not None

    def submit(self, commands: Iterable[Command]) -> list[asyncio.Future[Any]]:
        """Send commands; their answers, or errors, in order.

        Raises:
            ConnectionError: there is no connection, or too many wait already.
        """
        line = self._line
        if line is None:
            raise RedisConnectionError(f"no connection to Redis ({self._reason()})")
        if len(line) >= WAITING_MAX:
            raise RedisConnectionError(f"no connection to Redis ({WAITING_MAX} commands wait)")
        return line.send([packed(command) for command in commands])

    def _reason(self) -> str:
        return "not connected yet" if self.error is None else _said(self.error)

    def waited_s(self) -> float:
        """For how long the oldest command has had no answer."""
        return self._line.waited_s() if self._line is not None else 0.0

    async def keep(
        self, connect: Callable[[], Awaitable[Opened]], *, master_only: bool = False
    ) -> None:
        """Connect, pass commands and answers, and connect again, until cancelled.

        Args:
            connect: called for every attempt.
            master_only: a server that answers READONLY is no longer the one to talk to.
        """
        broken, pause_s = False, RECONNECT_MIN_S
        while True:
            try:
                opened = await connect()
                log.info("redis_link_up", server=opened.server, run_id=opened.run_id)
                broken, pause_s = False, RECONNECT_MIN_S
                await self._serve(opened, master_only=master_only)
            except REDIS_WEATHER as error:
                self.error = error
                if not broken:
                    log.warning("redis_link_broken", error=_said(error))
                broken = True
            finally:
                self.tried.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    async def _serve(self, opened: Opened, *, master_only: bool) -> None:
        """Pass commands and answers until the connection breaks; then everybody is told."""
        line = Line(opened.connection, master_only=master_only)
        self._line, self.run_id = line, opened.run_id
        self.tried.set()
        try:
            while (left_s := STALL_S - line.stalled_s()) > 0 and not line.ended.done():
                await asyncio.wait([line.ended], timeout=left_s)
            self.error = line.failure or TimeoutError(f"no answer for {STALL_S:.0f} s")
            raise self.error
        finally:
            self._line, self.run_id = None, None
            line.fail(RedisConnectionError(f"the connection to Redis broke ({self._reason()})"))
            line.abort()
            await close(opened.connection)


async def connect(url: str, *hello: Command) -> tuple[Any, list[Any]]:
    """A connection of redis-py, and the answers to the first commands on it.

    A command that is refused has its ResponseError as its answer.

    Raises:
        RedisError, OSError, TimeoutError: there is none to be had.
    """
    pool = ConnectionPool.from_url(
        url,
        protocol=2,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=None,
        retry=None,
    )
    connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py
    replies: list[Any] = []
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connection.connect()
            await connection.send_packed_command(
                b"".join(packed(command) for command in hello), check_health=False
            )
            for _ in hello:
                try:
                    replies.append(
                        await connection.read_response(timeout=math.inf, disconnect_on_error=False)
                    )
                except ResponseError as error:
                    replies.append(error)
    except BaseException:
        await close(connection)
        raise
    return connection, replies


async def close(connection: Any) -> None:
    """Close a connection of redis-py, whatever its state."""
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def packed(command: Command) -> bytes:
    """A command as it is sent."""
    parts = tuple(command)
    try:
        wire_bytes: bytes = hiredis.pack_command(parts)  # type: ignore[arg-type]  # narrow stub
    except TypeError:  # whole numbers of a kind of their own, as options and numpy have them
        plain = tuple(_plain(part) for part in parts)
        wire_bytes = hiredis.pack_command(plain)  # type: ignore[arg-type]  # narrow stub
    return wire_bytes


def _plain(part: bytes | str | float) -> bytes | str | float:
    whole = not isinstance(part, bytes | str) and float(part).is_integer()
    return int(part) if whole else part


async def gathered(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Every answer; the first refusal is raised when all have come.

    Raises:
        ResponseError: the server refused one of the commands; the others were executed.
        ConnectionError: the connection broke before the answers came.
    """
    replies, refused = [], None
    for future in futures:
        try:
            replies.append(await future)
        except ResponseError as error:
            refused = refused or error
    if refused:
        raise refused
    return replies


def _said(error: BaseException) -> str:
    """What an error says; a timeout says nothing."""
    return str(error) or type(error).__name__


async def scanned(ask: Callable[[Command], Awaitable[Any]], pattern: str) -> AsyncIterator[bytes]:
    """Keys of one server by a pattern, page by page."""
    cursor: bytes | str = "0"
    while True:
        cursor, found = await ask(("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_KEYS_PER_PAGE))
        for key in found:
            yield key
        if int(cursor) == 0:
            return


def info(said: Any) -> dict[str, str]:
    """INFO's text by name; empty where the server refused to say."""
    lines = said.decode().splitlines() if isinstance(said, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)
