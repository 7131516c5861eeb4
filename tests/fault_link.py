"""A link that loses, delays, reorders and breaks: what a network does to calls of Redis."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np
from redis.exceptions import ConnectionError as RedisConnectionError

from indexer.contract.functions import REDIS_WEATHER, Command
from indexer.contract.link import Link
from indexer.contract.link.deadline import DeadlineLink

EVENTS_KEPT: Final = 60
SLOW_MAX_S: Final = 0.3
STRAY_MAX_S: Final = 0.6


T = TypeVar("T")


def pick(rng: np.random.Generator, among: Sequence[T]) -> T:
    """One of them."""
    return among[int(rng.integers(len(among)))]


class Fault(StrEnum):
    """What becomes of one write."""

    LOST = "lost"  # never arrives, and no answer comes
    UNANSWERED = "unanswered"  # executed, but no answer comes
    SLOW = "slow"  # late, and all behind it
    BROKEN = "broken"  # the connection ends before it is sent
    BROKEN_AFTER = "broken_after"  # it ends after the execution
    STRAY = "stray"  # it ends, and what was under way is executed later than what comes next


class FaultLink(DeadlineLink):
    """Wraps a link; order is kept as on one connection, but for strays.

    Args:
        inner: the link to Redis.
        rng: draws the faults.
        name: in `events`.
        events: what was done, for whoever has to understand a failure.
    """

    def __init__(
        self,
        inner: Link,
        rng: np.random.Generator,
        *,
        name: str = "",
        events: deque[str] | None = None,
    ) -> None:
        super().__init__(deadline_s=None)
        self.fault_ratio = 0.0
        self.counts: Counter[Fault] = Counter()
        self._inner = inner
        self._rng = rng
        self._name = name
        self._events = deque[str](maxlen=EVENTS_KEPT) if events is None else events
        self._queue: asyncio.Queue[tuple[list[Command], asyncio.Future[Any], Fault | None]]
        self._queue = asyncio.Queue()
        self._open = asyncio.Event()
        self._open.set()
        self._cut = False
        self._tasks: set[asyncio.Task[None]] = set()

    def pause(self) -> None:
        """Nothing is delivered until `resume`; whoever waits, waits."""
        self._open.clear()

    def resume(self) -> None:
        """What was held back is delivered, in order."""
        self._open.set()

    def cut(self) -> None:
        """For good, as when this end is killed: only what is under way still arrives."""
        self._cut = True

    def is_idle(self) -> bool:
        """Whether nothing is held back or under way."""
        return self._queue.empty() and not self._tasks

    async def _execute(self, commands: Iterable[Command]) -> list[Any]:
        fault = None
        if self._rng.random() < self.fault_ratio:
            fault = pick(self._rng, list(Fault))
            self.counts[fault] += 1
        batch = list(commands)
        names = [str(c[1]) if str(c[0]).startswith("FCALL") else str(c[0]) for c in batch]
        self._events.append(f"{self._name} {fault or 'sends'} {' '.join(names)[:120]}")
        if self._cut or fault is Fault.BROKEN:
            raise RedisConnectionError("broken by the test")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if fault is not Fault.LOST:
            self._queue.put_nowait((batch, answer, fault))
        return list(await answer)

    async def _pump(self) -> None:
        while True:
            batch, answer, fault = await self._queue.get()
            await self._open.wait()
            if fault is Fault.SLOW:
                await asyncio.sleep(self._rng.uniform(0, SLOW_MAX_S))
            task = asyncio.ensure_future(self._deliver(batch, answer, fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(
        self, batch: list[Command], answer: asyncio.Future[Any], fault: Fault | None
    ) -> None:
        reply: list[Any] | Exception
        if fault is Fault.STRAY:
            _settle(answer, RedisConnectionError("broken by the test"))
            await asyncio.sleep(self._rng.uniform(0, STRAY_MAX_S))
        try:
            reply = await self._inner.execute(batch)
        except REDIS_WEATHER as error:
            reply = error
        if fault is Fault.BROKEN_AFTER:
            reply = RedisConnectionError("broken by the test")
        if fault is not Fault.UNANSWERED:
            _settle(answer, reply)

    def scan(self, anchor: str, pattern: str) -> AsyncIterator[bytes]:
        """As of the link inside."""
        return self._inner.scan(anchor, pattern)

    @property
    def has_all_keys(self) -> bool:
        """See `Link`."""
        return self._inner.has_all_keys

    def server_of(self, key: str) -> str | None:
        """As of the link inside."""
        return self._inner.server_of(key)

    async def run(self) -> None:
        """Deliver until cancelled, and then what is under way, so that it has landed."""
        try:
            await self._pump()
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks)

    def running(self) -> AbstractAsyncContextManager[None]:
        """While it delivers."""
        return _running(self)


@asynccontextmanager
async def _running(link: FaultLink) -> AsyncIterator[None]:
    pump = asyncio.ensure_future(link.run())
    try:
        yield
    finally:
        pump.cancel()
        await asyncio.wait([pump])


def _settle(answer: asyncio.Future[Any], reply: list[Any] | Exception) -> None:
    """Unless whoever asked has gone."""
    if answer.done():
        return
    if isinstance(reply, Exception):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)
