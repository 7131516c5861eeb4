"""Runs the pure engine in real time: one task, absolute deadlines, no task switch per token."""

import asyncio
import time
from typing import Protocol

from workers.simulated.engine import Engine
from workers.simulated.event_encoding import EventEncoding, encode_batch
from workers.simulated.metrics import EngineMetrics
from workers.simulated.publisher import EventPublisher
from workers.simulated.request import Request
from workers.simulated.step import Step, StepOutput


class TokenSink(Protocol):
    """Receives what the engine does for one request, called from inside the engine's task."""

    @property
    def finish_reason(self) -> str:
        """Why the request ends when it runs to its end: `length` or `stop`."""

    def admitted(self, hit_tokens: int) -> None:
        """The request entered the batch; `hit_tokens` of its prompt need no computing."""

    def token(self, position: int, *, last: bool) -> None:
        """One token was generated."""


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


class _Live:
    """Times of one request in the engine, monotonic seconds."""

    __slots__ = ("admitted_s", "arrived_s", "first_token_s", "last_token_s", "sink")

    def __init__(self, sink: TokenSink, now_s: float) -> None:
        self.sink = sink
        self.arrived_s = self.admitted_s = self.first_token_s = self.last_token_s = now_s


class EngineRuntime:
    """The engine with its clock, its publisher and its metrics.

    Virtual time passes `speedup` times as fast as real time. Every step ends at an absolute
    deadline: a late one does not move the ones after it, so that sleeping does not drift. When
    the processor is too slow for the timetable, the lag shows in the metrics.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        metrics: EngineMetrics,
        publisher: EventPublisher | None,
        encoding: EventEncoding,
        speedup: float,
        waiting_max: int,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._publisher = publisher
        self._encoding = encoding
        self._speedup = speedup
        self._waiting_max = waiting_max
        self._live: dict[str, _Live] = {}
        self._work_arrived = asyncio.Event()

    def check_room(self, count: int) -> None:
        """Whether `count` more requests may wait.

        Raises:
            QueueFullError: they may not; counted as a rejection.
        """
        if self.engine.waiting_count + count > self._waiting_max:
            self.metrics.rejected_count += 1
            raise QueueFullError(f"at most {self._waiting_max} requests may wait; try again later")

    def submit(self, request: Request, sink: TokenSink, arrived_s: float | None = None) -> None:
        """Queue a request that arrived just now, or at that monotonic time.

        Its tokens go to `sink`.
        """
        self.engine.add(request)
        self._live[request.request_id] = _Live(sink, arrived_s or time.monotonic())
        self._work_arrived.set()

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is still here; its blocks are free at once."""
        if self.engine.abort(request_id):
            del self._live[request_id]
            self.metrics.finished_counts["abort"] += 1

    async def run(self) -> None:
        """Step the engine until cancelled."""
        deadline_s = time.monotonic()
        virtual_s = 0.0
        while True:
            step = self.engine.start_step(virtual_s)
            if step is None:
                self.metrics.observe_lag(0.0)
                self._work_arrived.clear()
                await self._work_arrived.wait()
                idle_since_s, deadline_s = deadline_s, time.monotonic()
                # A timer may wake a moment early; an eviction policy's clock never goes back.
                virtual_s += max(0.0, deadline_s - idle_since_s) * self._speedup
                continue
            self._note_admissions(step)
            deadline_s += step.duration_s / self._speedup
            virtual_s += step.duration_s
            now_s = time.monotonic()
            self.metrics.observe_lag(max(0.0, now_s - deadline_s))
            # Timers tick in milliseconds: an early or late wake-up moves no later deadline.
            await asyncio.sleep(max(0.0, deadline_s - now_s))
            self._hand_out(self.engine.finish_step(step))

    def _note_admissions(self, step: Step) -> None:
        now_s = time.monotonic()
        for request, hit_tokens, tier_hit_tokens in step.admissions:
            live = self._live[request.request_id]
            live.admitted_s = now_s
            self.metrics.queue.observe(now_s - live.arrived_s)
            live.sink.admitted(hit_tokens + tier_hit_tokens)

    def _hand_out(self, output: StepOutput) -> None:
        if output.events and self._publisher is not None:
            self._publisher.publish(
                encode_batch(output.events, ts=time.time(), encoding=self._encoding)
            )
        now_s = time.monotonic()
        metrics = self.metrics
        for request, position, last in output.tokens:
            live = self._live[request.request_id]
            if position:
                metrics.itl.observe(now_s - live.last_token_s)
            else:
                live.first_token_s = now_s
                metrics.ttft.observe(now_s - live.arrived_s)
                metrics.prefill.observe(now_s - live.admitted_s)
            live.last_token_s = now_s
            if last:
                del self._live[request.request_id]
                metrics.e2e.observe(now_s - live.arrived_s)
                metrics.decode.observe(now_s - live.first_token_s)
                metrics.finished_counts[live.sink.finish_reason] += 1
            live.sink.token(position, last=last)
