"""What every call of a router to Redis goes through: a deadline, and a breaker for all of them.

While the breaker is open, requests are not asked to wait for a Redis that does not answer: they are
decided from what is known here. `IndexClient.run` probes meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from enum import StrEnum
from types import TracebackType
from typing import Final

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.waits import Wait, Waits
from router import telemetry
from router.errors import IndexUnavailable, RouterError
from router.index.breaker import PROBE_EVERY_S, Breaker

log = structlog.get_logger()

SILENCE_DEADLINES: Final = 2
"""Deadlines without any answer after which Redis is no longer asked."""

PATIENCE_S: Final = 1.0
"""The longest that the ledger waits for a probe before it tries for itself."""


class Call(StrEnum):
    """What a call to Redis is for."""

    READ = "read"
    WRITE = "write"


class RedisGuard:
    """Deadline and breaker of one router's calls.

    The breaker is used only while somebody probes, or nobody would ever close it.

    Args:
        deadline_s: for one call.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._breaker = Breaker(silence_s=SILENCE_DEADLINES * deadline_s)
        self._waits = Waits(deadline_s)
        self._probing = False
        self._refused = 0  # decisions that were not made to wait
        self._faults: dict[Call, str] = {}  # what the last call of each kind ran into
        self._opened = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether Redis is not to be asked."""
        return self._breaker.is_open

    def degraded_reason(self) -> str | None:
        """Why decisions are made without Redis now, or None."""
        if self._breaker.is_open:
            fault = self._faults.get(Call.READ, self._breaker.reason)  # the last probe's
            return f"Redis does not answer: {fault}"
        for call, fault in self._faults.items():
            return f"the last {call} of Redis failed: {fault}"
        return None

    def asking(self, call: Call) -> "Asking":
        """One call of a request, within the deadline: to be awaited `with` it.

        Raises:
            IndexUnavailable: the breaker is open, so the call is not made.
            TimeoutError: on leaving; Redis did not answer in time.
        """
        if self._breaker.is_open:
            if call is Call.READ:
                self._refused += 1
            raise IndexUnavailable("The index (Redis) does not answer. Try again.")
        return Asking(self, call, self._waits.one())

    def failed(self, call: Call, begun_s: float, error: BaseException) -> None:
        """A call that began then was not answered, or refused."""
        self._faults[call] = _said(error)
        # A refusal (READONLY, OOM, NOPERM) is an answer, and costs nobody a deadline.
        if not self._probing or isinstance(error, ResponseError):
            return
        broken = isinstance(error, RedisConnectionError)
        if self._breaker.failed(begun_s, time.monotonic(), _said(error), broken=broken):
            log.warning("index_unavailable", error=self._breaker.reason)
            telemetry.INDEX_OPEN.set(1)
            telemetry.INDEX_OPENINGS.inc()
            self._refused = 0
            self._closed.clear()
            self._opened.set()

    def succeeded(self, call: Call) -> None:
        """A call was answered in time."""
        self._faults.pop(call, None)
        self._breaker.succeeded()

    # -- whoever probes ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody probes."""
        self._probing = True
        try:
            yield
        finally:
            self._probing = False

    def probed(self, begun_s: float, error: BaseException | None) -> None:
        """A probe, or any read in the background, has ended."""
        if error is not None:
            self.failed(Call.READ, begun_s, error)
        else:
            self.succeeded(Call.READ)
        now_s = time.monotonic()
        if self._breaker.probed(now_s, answered=error is None):
            log.info(
                "index_recovered",
                open_s=round(now_s - self._breaker.opened_s, 3),
                decisions_degraded=self._refused,
            )
            telemetry.INDEX_OPEN.set(0)
            self._opened.clear()
            self._closed.set()

    async def until_probe(self, calm_s: float) -> None:
        """Wait until the next probe is due; without an outage, for so long or until one begins."""
        if self._breaker.is_open:
            await asyncio.sleep(PROBE_EVERY_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(calm_s):
                await self._opened.wait()

    async def until_retry(self, calm_s: float) -> None:
        """Wait until what has failed may be tried again."""
        if not self._breaker.is_open:
            await asyncio.sleep(calm_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._closed.wait()


class Asking:
    """One call under way; see `RedisGuard.asking`. Every request makes two of them."""

    __slots__ = ("_begun_s", "_call", "_guard", "_wait")

    def __init__(self, guard: RedisGuard, call: Call, wait: Wait) -> None:
        self._guard, self._call, self._wait = guard, call, wait

    def __enter__(self) -> None:
        self._begun_s = time.monotonic()
        self._wait.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._wait.__exit__(kind, error, trace)
        except TimeoutError as late:
            self._guard.failed(self._call, self._begun_s, late)
            raise
        if isinstance(error, REDIS_WEATHER):
            self._guard.failed(self._call, self._begun_s, error)
        elif error is None or isinstance(error, RouterError):
            self._guard.succeeded(self._call)  # it has answered, though maybe nothing of use


def _said(error: BaseException) -> str:
    """What an error says; a timeout says nothing."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
