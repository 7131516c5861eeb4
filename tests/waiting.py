"""Waiting for what no event announces: look again and again, with a deadline."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0
"""Several of the product's own periods (leases, measurements: 10 s); met, it costs nothing."""

POLL_S = 0.01


async def until(condition: Callable[[], Any], what: str, deadline_s: float = WAIT_S) -> None:
    """Wait for a condition (plain or awaitable); `what` is said when it never comes."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise AssertionError(f"not within {deadline_s:g} s: {what}") from error


async def until_equal(expected: object, read: Callable[[], Any]) -> None:
    """Wait until a reading (plain or awaitable) is as expected; a failure tells the last one."""
    seen: object = None

    async def is_expected() -> bool:
        nonlocal seen
        value = read()
        seen = await value if inspect.isawaitable(value) else value
        return seen == expected

    try:
        await until(is_expected, f"{expected!r}")
    except AssertionError as error:
        raise AssertionError(f"{error}; last seen: {seen!r}") from error
