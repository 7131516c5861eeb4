"""The sidecar's connection to Redis: every command has a deadline and is sent once."""

import asyncio
from typing import Any, Final

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

DEADLINE_S: Final = 2.0
CONNECTIONS_MAX: Final = 16

REDIS_WEATHER: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ResponseError,
    OSError,
)
"""What a call may raise while the server is away, failing over, loading or out of memory."""


class BoundedRedis(redis.asyncio.Redis):
    """A client whose commands raise TimeoutError (an OSError) after DEADLINE_S.

    redis-py's own `socket_timeout` rests on `asyncio.wait_for`, which on Python 3.11 can swallow a
    cancellation, and costs a task per command.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command."""
        async with asyncio.timeout(DEADLINE_S):
            # redis-py leaves this one method untyped
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def connect(url: str) -> redis.asyncio.Redis:
    """A client of redis://, rediss:// or unix://; whoever calls decides about repeating."""
    return BoundedRedis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=DEADLINE_S,
        max_connections=CONNECTIONS_MAX,
        retry=Retry(NoBackoff(), 0),
    )
