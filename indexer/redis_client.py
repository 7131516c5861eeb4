"""The sidecar's connection to Redis: every command has a deadline and is sent once."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from indexer.contract import functions
from indexer.contract.functions import Call, Command

DEADLINE_S: Final = 2.0
CONNECTIONS_MAX: Final = 16


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


async def run_all(client: redis.asyncio.Redis, calls: Sequence[Call]) -> list[Any]:
    """Send several calls in one pipeline, which has a deadline; see `functions.run_all`."""

    async def send(commands: Sequence[Command]) -> list[Any]:
        async with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            async with asyncio.timeout(DEADLINE_S):
                return list(await pipeline.execute(raise_on_error=False))

    return await functions.run_all(send, client, calls)
