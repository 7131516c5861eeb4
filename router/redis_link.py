"""One connection to Redis for a whole router: commands of all requests share it, in order.

A pooled client takes a connection for each command, and a cancelled command costs a connection. A
decision sends three commands and clients leave at any moment, so here commands are appended to one
stream and answered in order; a caller that stops waiting leaves nothing behind. What is sent in one
turn of the event loop goes out in one write. Connecting, TLS and authentication are redis-py's.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import hiredis
import redis.asyncio
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from indexer.contract.functions import REDIS_WEATHER, Command

log = structlog.get_logger()

RECONNECT_S: Final = 0.1
CONNECT_TIMEOUT_S: Final = 2.0
STALL_S: Final = 5.0
"""A connection whose oldest command has waited this long is given up."""

WAITING_MAX: Final = 65_536
"""Commands without an answer; beyond, Redis counts as gone."""


class RedisLink:
    """A multiplexed connection that heals itself; `run` must be running.

    Args:
        url: as redis-py takes it: redis://, rediss://, unix://.
    """

    def __init__(self, url: str) -> None:
        self._pool = redis.asyncio.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=None,
            retry=None,
        )
        self._out: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._to_send = asyncio.Event()
        self._up = asyncio.Event()
        self._tried = asyncio.Event()

    async def execute_command(self, *command: bytes | str | float) -> Any:
        """One command, one answer.

        Raises:
            ResponseError: Redis refused the command.
            ConnectionError: there is no connection, or it broke before the answer came.
        """
        (reply,) = await self.execute([command])
        return reply

    async def execute(self, commands: Iterable[Command]) -> list[Any]:
        """Several commands in one write, their answers in order.

        Raises:
            ResponseError: Redis refused one of them; the others were executed.
            ConnectionError: there is no connection, or it broke before the answers came.
        """
        if not self._tried.is_set():  # the very first connection is worth waiting for
            await self._tried.wait()
        if not self._up.is_set() or len(self._waiting) >= WAITING_MAX:
            raise RedisConnectionError("no connection to Redis")
        loop, sent_s = asyncio.get_running_loop(), time.monotonic()
        futures = []
        for command in commands:
            self._out.append(_packed(command))
            future: asyncio.Future[Any] = loop.create_future()
            self._waiting.append((future, sent_s))
            futures.append(future)
        self._to_send.set()
        replies, refused = [], None
        for future in futures:
            try:
                replies.append(await future)
            except ResponseError as error:
                refused = refused or error
        if refused:
            raise refused
        return replies

    async def run(self) -> None:
        """Connect, pass commands and answers, and connect again, until cancelled."""
        broken = False
        try:
            while True:
                try:
                    await self._serve()
                except* REDIS_WEATHER as group:
                    if self._up.is_set() or not broken:
                        log.warning("redis_link_broken", error=repr(group.exceptions[0]))
                    broken = True
                finally:
                    self._up.clear()
                    self._tried.set()
                    self._fail_waiting()
                await asyncio.sleep(RECONNECT_S)
        finally:
            await self._pool.disconnect(inuse_connections=True)

    async def _serve(self) -> None:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.connect()
            self._up.set()
            self._tried.set()
            log.info("redis_link_up")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(connection))
                tasks.create_task(self._read(connection))
        finally:
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def _write(self, connection: Any) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            packed, self._out = self._out, []
            await connection.send_packed_command(b"".join(packed), check_health=False)

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(STALL_S) as timeout:
                    loop = asyncio.get_running_loop()
                    while True:
                        await self._read_one(connection)
                        timeout.reschedule(loop.time() + STALL_S)
            except TimeoutError:
                if self._waiting and time.monotonic() - self._waiting[0][1] >= STALL_S:
                    raise

    async def _read_one(self, connection: Any) -> None:
        try:
            reply = await connection.read_response(timeout=math.inf, disconnect_on_error=False)
        except ResponseError as error:
            reply = error
        future, _ = self._waiting.popleft()
        if future.done():  # the caller has stopped waiting
            return
        if isinstance(reply, ResponseError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _fail_waiting(self) -> None:
        self._out.clear()
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(RedisConnectionError("the connection to Redis broke"))
                future.exception()  # the caller may have gone without asking


def _packed(command: Command) -> bytes:
    parts = tuple(part if isinstance(part, bytes | str) else repr(part) for part in command)
    packed: bytes = hiredis.pack_command(parts)  # type: ignore[arg-type]  # its stub is too narrow
    return packed
