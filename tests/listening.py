"""Servers that a test plays itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening(app: web.Application, *, cancels: bool = False) -> AsyncIterator[str]:
    """The base URL of an application on a free port, until the context ends.

    Args:
        app: what it does.
        cancels: a handler whose client goes is cancelled.
    """
    runner = web.AppRunner(app, handler_cancellation=cancels, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
