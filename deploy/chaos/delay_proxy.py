"""A TCP proxy whose answers can be made late: a slow Redis."""

import asyncio
from contextlib import suppress
from typing import Final, Self

CHUNK_BYTES_MAX: Final = 64 * 1024
CHUNKS_HELD_MAX: Final = 4096
"""Chunks that wait for their time in one connection; then the server's side is not read."""


class DelayProxy:
    """Passes bytes both ways; each answer waits for `delay_s`, in order.

    Use as an async context manager.

    Args:
        host: of the server behind it, and to listen on.
        port: of the server behind it.
        listen_port: where to listen; 0 for any.

    Attributes:
        delay_s: how late each piece of an answer is from now on.
    """

    def __init__(self, host: str, port: int, *, listen_port: int = 0) -> None:
        self._host = host
        self._target_port = port
        self._port = listen_port
        self._connections: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, self._target_port)
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_HELD_MAX)
        try:
            async with asyncio.TaskGroup() as tasks:
                ends = [
                    tasks.create_task(_pump(reader, server_writer)),
                    tasks.create_task(self._hold(server_reader, held)),
                    tasks.create_task(_let_go(held, writer)),
                ]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()
        except* OSError:
            pass  # one side is gone, so the other goes
        finally:
            server_writer.transport.abort()

    async def _hold(
        self, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        while chunk := await reader.read(CHUNK_BYTES_MAX):
            await held.put((loop.time() + self.delay_s, chunk))


async def _let_go(held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s, chunk = await held.get()
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        writer.write(chunk)
        await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES_MAX):
        writer.write(chunk)
        await writer.drain()
