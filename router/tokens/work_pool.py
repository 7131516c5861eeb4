"""Threads for blocking work, with a bounded queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class PoolFull(Exception):  # noqa: N818 - names a condition
    """As much work waits as may; this was not taken."""


class WorkPool:
    """Runs work in threads, in the order it came. To be used from one event loop.

    Args:
        threads: that run at once.
        waiting_max: pieces of work that may wait for a thread.
        name: of the threads.
    """

    def __init__(self, *, threads: int, waiting_max: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._pieces_max = threads + waiting_max
        self._pieces = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What the work returns or raises.

        Whoever stops waiting leaves it: work that has not begun is skipped, work that has begun
        goes on to its end, and holds its place until then.

        Raises:
            PoolFull: too much work waits already.
        """
        if self._pieces >= self._pieces_max:
            raise PoolFull
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._pieces += 1
        self._executor.submit(self._do, work, outcome, loop)
        return await outcome

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _do(
        self,
        work: Callable[[], T],
        outcome: "asyncio.Future[T]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        result: Any = None
        problem: Exception | None = None
        if not outcome.done():
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - it is raised where the work is awaited
                problem = error
        if not loop.is_closed():  # work that outlives the loop has nobody to tell
            loop.call_soon_threadsafe(self._settle, outcome, result, problem)

    def _settle(self, outcome: "asyncio.Future[T]", result: Any, problem: Exception | None) -> None:
        self._pieces -= 1
        if outcome.done():
            return
        if problem is not None:
            outcome.set_exception(problem)
        else:
            outcome.set_result(result)
