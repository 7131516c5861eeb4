"""The Redis Functions of the contract: loading them, and sending calls of them.

A builder returns a `Call`; `run` sends it, loads the libraries when the server does not know them
(first start, failover, flush) and retries once. The builders, one per function, are in
`index_functions.py`, `fleet_functions.py`, `reservations.py`, `upkeep.py`, `quota.py` and
`responses.py`. Meaning, cost and return value of each function are in the header above its Lua
source.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from redis.exceptions import RedisError, ResponseError

from indexer.contract import libraries
from indexer.contract.call import Call


class RedisClient(Protocol):
    """What is needed of a client; redis-py's asyncio clients have it."""

    async def execute_command(self, *args: Any) -> Any:
        """Send one command and return its answer, bytes undecoded."""
        ...


class BatchClient(RedisClient, Protocol):
    """What is needed to send several commands at once; `link.Link` has it."""

    async def execute(self, commands: Iterable["Command"]) -> list[Any]:
        """Send them in one round trip; the answers in order, a refusal is raised after all."""
        ...


REDIS_WEATHER: Final = (RedisError, OSError, TimeoutError)
"""What a call may raise while Redis is away, slow, failing over, loading or out of memory."""


Command = Sequence[bytes | str | float]


async def load(redis: RedisClient) -> None:
    """Load all libraries; loading identical text again changes nothing."""
    for name in libraries.PARTS:
        await redis.execute_command("FUNCTION", "LOAD", "REPLACE", libraries.text(name))


async def run(redis: RedisClient, call: Call) -> Any:
    """Send a call; raises what redis-py raises. The caller sets the deadline."""
    try:
        return await redis.execute_command(*call.command())
    except ResponseError as error:
        if not is_missing(error):
            raise
    await load(redis)
    return await redis.execute_command(*call.command())


async def run_all(redis: BatchClient, calls: Sequence[Call]) -> list[Any]:
    """Send several calls in one round trip, as `run` sends one; executed in order.

    Each may be executed twice, where the libraries were missing.

    Raises:
        ResponseError: Redis refused one of them; the others were executed.
    """
    commands = [call.command() for call in calls]
    try:
        return await redis.execute(commands)
    except ResponseError as error:
        if not is_missing(error):
            raise
    await load(redis)
    return await redis.execute(commands)


def is_missing(error: Exception) -> bool:
    """Whether a server answered that it does not know the function."""
    return "function not found" in str(error).lower()
