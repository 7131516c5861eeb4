"""An engine's load as it tells it itself after each step, where our plugin for vLLM runs in it.

A message is one frame of msgpack: `[2, rank, running, waiting, KV usage ratio, sleep level, first
tokens, ended requests, computed tokens, process start]`. The engine's metrics are still asked, but
only now and then: for what the messages do not tell, and because a message may be lost. They tell
the start of the process as well: steps of another one, such as a second engine that got the first
one's endpoint, or that of before a restart, are dropped.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgpack
import structlog
import zmq
import zmq.asyncio

from indexer.contract.records import EngineCounters
from indexer.engine.engine_metrics import EngineSample, RequestTotals, engine_counters
from indexer.engine.ring import open_socket
from indexer.telemetry import Telemetry

MESSAGE_VERSION: Final = 2
MESSAGE_FIELDS: Final = 10

RANKS_MAX: Final = 1024
"""Of one engine: each has a series of its own among the metrics."""

MESSAGES_MAX: Final = 1000
"""That may wait here; the newest is what counts, and a thousand steps take seconds."""

SCRAPE_S: Final = 1.0
"""Between two looks at the metrics while steps are told; after so long without one they are asked
each time, and older steps say nothing against them."""

PACE_S: Final = 0.01
"""Least time between two heartbeats that a step brings about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The load of one rank after a step.

    Attributes:
        rank: as the engine's metrics label it.
        counters: its load.
        sleep_level: as EngineSample has it.
        totals: since its start.
        computed_tokens: likewise, as EngineSample has them.
        started_s: of its process, as EngineSample has it.
        heard_s: monotonic clock.
    """

    rank: str
    counters: EngineCounters
    sleep_level: int | None
    totals: RequestTotals
    computed_tokens: int
    started_s: float | None
    heard_s: float


class TellsSamples(Protocol):
    """Has the engine's metrics."""

    async def samples(self) -> dict[str, EngineSample]:
        """Load by `engine` label."""
        ...


def parse_step(payload: bytes, heard_s: float) -> Step:
    """Read a message.

    Args:
        payload: its one frame.
        heard_s: monotonic clock.

    Raises:
        ValueError: it is none of ours, or of another version.
    """
    try:
        fields = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"no msgpack: {error!r}") from error
    if not isinstance(fields, list) or len(fields) < MESSAGE_FIELDS:
        raise ValueError(f"not an array of {MESSAGE_FIELDS}")
    version, rank, running, waiting, kv_usage, sleep_level, *others = fields[:MESSAGE_FIELDS]
    first_tokens, ended, computed, started_s = others
    counts = (rank, running, waiting, first_tokens, ended, computed)
    if version != MESSAGE_VERSION:
        raise ValueError(f"of version {version!r}, not {MESSAGE_VERSION}")
    if not all(type(one) is int and one >= 0 for one in counts):
        raise ValueError(f"counts {counts!r}")
    if sleep_level is not None and (type(sleep_level) is not int or sleep_level < 0):
        raise ValueError(f"sleep level {sleep_level!r}")
    if rank >= RANKS_MAX:
        raise ValueError(f"rank {rank}, of {RANKS_MAX} at most")
    if not _is_number(kv_usage):
        raise ValueError(f"KV usage {kv_usage!r}")
    if started_s is not None and not _is_number(started_s):
        raise ValueError(f"process start {started_s!r}")
    return Step(
        rank=str(rank),
        counters=engine_counters(running, waiting, kv_usage),
        sleep_level=sleep_level,
        totals=RequestTotals(first_tokens_count=first_tokens, ended_count=ended),
        computed_tokens=computed,
        started_s=started_s,
        heard_s=heard_s,
    )


def _is_number(told: object) -> bool:
    return type(told) is int or (type(told) is float and math.isfinite(told))


def newer(sample: EngineSample, asked_s: float, step: Step) -> EngineSample:
    """What is known of a rank by both.

    Counts only grow while a process lives, so the higher ones are the newer; equal ones are told
    apart by when the metrics were asked. Counts of a process that has just started are lower: then
    the metrics are right as soon as they are asked again. A plugin that has died counts no more.

    Args:
        sample: from the metrics.
        asked_s: monotonic clock before that.
        step: the last one heard of.
    """
    totals, told = sample.totals, step.totals
    if asked_s - step.heard_s > SCRAPE_S:
        return sample
    if totals is not None:
        before = totals.first_tokens_count + totals.ended_count
        after = told.first_tokens_count + told.ended_count
        if after < before or (after == before and step.heard_s < asked_s):
            return sample
    elif step.heard_s < asked_s:
        return sample
    return replace(
        sample,
        counters=step.counters,
        sleep_level=step.sleep_level,
        totals=told,
        computed_tokens=step.computed_tokens,
    )


class StepStatistics:
    """Hears the steps of one engine, and says what its load is by the newest of all that is known.

    Without messages it is as if it were not there: the metrics are asked each time. The same with
    those of another process than the one that has the metrics.
    """

    def __init__(self, endpoint: str, telemetry: Telemetry) -> None:
        """Nothing is heard yet.

        Args:
            endpoint: where the engine tells its steps.
            telemetry: metrics.
        """
        self._endpoint = endpoint
        self._telemetry = telemetry
        self._steps: dict[str, Step] = {}
        self._scraped: Mapping[str, EngineSample] = {}
        self._scraped_s = float("-inf")
        self._started_s: float | None = None  # of the process that has these metrics
        self._is_readable = self._is_ours = True
        self._changed = asyncio.Event()
        self._log = structlog.get_logger()

    async def receive(self) -> None:
        """Hear messages until cancelled."""
        with zmq.asyncio.Context() as context:
            socket = open_socket(context, zmq.SUB, MESSAGES_MAX)
            try:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                socket.connect(self._endpoint)
                while True:
                    frames = await socket.recv_multipart()
                    self._hear(b"".join(frames))
            finally:
                socket.close(linger=0)

    def _hear(self, payload: bytes) -> None:
        try:
            step = parse_step(payload, time.monotonic())
        except ValueError as error:
            self._telemetry.steps_malformed.inc()
            if self._is_readable:  # of another version all are: a line for the first is enough
                self._log.warning("step_unreadable", error=str(error))
            self._is_readable = False
            return
        self._is_readable = True
        if not self._is_of_engine(step):
            self._telemetry.steps_foreign.inc()
            if self._is_ours:
                self._log.warning("steps_of_another_engine", endpoint=self._endpoint)
            self._is_ours = False
            return
        self._is_ours = True
        self._telemetry.steps.labels(step.rank).inc()
        known = self._steps.get(step.rank)
        if known is None:
            self._log.info("steps_heard", rank=step.rank, endpoint=self._endpoint)
        if known is None or replace(known, heard_s=step.heard_s) != step:
            self._changed.set()
        self._steps[step.rank] = step

    def _is_of_engine(self, step: Step) -> bool:
        """As far as both tell: it is from the process whose metrics were asked."""
        return None in (step.started_s, self._started_s) or step.started_s == self._started_s

    async def samples(self, engine: TellsSamples) -> dict[str, EngineSample]:
        """Load by `engine` label, as `EngineApi.samples`.

        Raises:
            EngineUnreachable: the metrics were asked, and not told.
        """
        now_s = time.monotonic()
        heard_s = max((step.heard_s for step in self._steps.values()), default=float("-inf"))
        if now_s - heard_s >= SCRAPE_S or now_s - self._scraped_s >= SCRAPE_S:
            self._scraped = await engine.samples()
            self._scraped_s = now_s
            self._started_s = next((one.started_s for one in self._scraped.values()), None)
            self._steps = {
                rank: one for rank, one in self._steps.items() if self._is_of_engine(one)
            }
        self._changed.clear()
        return {
            rank: newer(sample, self._scraped_s, self._steps[rank])
            if rank in self._steps
            else sample
            for rank, sample in self._scraped.items()
        }

    async def pause(self, seconds: float) -> None:
        """Return after this, or when a step has changed the load, though not before PACE_S."""
        if seconds <= PACE_S:
            await asyncio.sleep(max(0.0, seconds))
            return
        await asyncio.sleep(PACE_S)
        try:
            async with asyncio.timeout(seconds - PACE_S):
                await self._changed.wait()
        except TimeoutError:
            pass
