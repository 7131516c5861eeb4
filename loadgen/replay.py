"""Runs a schedule against a target: open or closed loop, bounded, interruptible."""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loadgen.arrivals import Schedule
from loadgen.client import Call, StreamingClient, Target
from loadgen.conversations import previous_turns
from loadgen.records import RequestRecord
from loadgen.trace import TraceRow
from loadgen.workloads.pacing import Pace, Step, plan

PROGRESS_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a replay stands."""

    total_count: int
    sent_count: int
    finished_count: int
    errors_count: int
    elapsed_s: float

    @property
    def in_flight_count(self) -> int:
        """Requests sent and not finished."""
        return self.sent_count - self.finished_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Records in row order; fewer than rows, and so marked, after an interruption."""

    records: tuple[RequestRecord, ...]
    interrupted: bool


class _Replay:
    """One run and its counters."""

    def __init__(
        self, client: StreamingClient, rows: Sequence[TraceRow], in_flight_max: int
    ) -> None:
        self.start_s = 0.0
        self.records: dict[int, RequestRecord] = {}
        self.sent_count = 0
        self.errors_count = 0
        self._client = client
        self._rows = rows
        self._slots = asyncio.Semaphore(in_flight_max)
        self._finished = [asyncio.Event() for _ in rows]

    async def run(
        self, schedule: Schedule, *, previous: Sequence[int | None], follow_ups: Mapping[int, Step]
    ) -> None:
        """Send each row at its time; returns when every answer has ended.

        Args:
            schedule: a time per row.
            previous: whose answer a row has to wait for, besides.
            follow_ups: rows that are due a think time after an answer, whatever the schedule says.
        """
        self.start_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, step in follow_ups.items():
                group.create_task(self._follow(index, step))
            for index, (row, scheduled_s) in enumerate(zip(self._rows, schedule, strict=True)):
                if index in follow_ups:
                    continue
                # The body is made before its time comes, so that making it delays nothing.
                call = self._client.prepare(row, row_index=index, scheduled_s=scheduled_s)
                await asyncio.sleep(self.start_s + scheduled_s - time.monotonic())
                group.create_task(self._send(call, previous[index]))

    async def _follow(self, index: int, step: Step) -> None:
        assert step.parent is not None, index
        await self._finished[step.parent].wait()
        due_s = time.monotonic() - self.start_s + step.after_s
        call = self._client.prepare(self._rows[index], row_index=index, scheduled_s=round(due_s, 6))
        await asyncio.sleep(self.start_s + due_s - time.monotonic())
        await self._send(call, None)

    async def _send(self, call: Call, previous: int | None) -> None:
        if previous is not None:
            await self._finished[previous].wait()
            due_s = max(call.scheduled_s, time.monotonic() - self.start_s)
            call = replace(call, scheduled_s=round(due_s, 6))
        async with self._slots:
            self.sent_count += 1
            record = await self._client.send(call, start_s=self.start_s)
        self.records[call.row_index] = record
        self.errors_count += record.error is not None
        self._finished[call.row_index].set()

    def progress(self) -> Progress:
        return Progress(
            total_count=len(self._rows),
            sent_count=self.sent_count,
            finished_count=len(self.records),
            errors_count=self.errors_count,
            elapsed_s=time.monotonic() - self.start_s if self.start_s else 0.0,
        )


async def replay(
    rows: Sequence[TraceRow],
    schedule: Schedule,
    target: Target,
    *,
    in_flight_max: int = 1024,
    wait_for_previous_turn: bool = False,
    pace: Pace = "timestamps",
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    interrupt_signals: Sequence[signal.Signals] = (),
) -> ReplayResult:
    """Send every row at its scheduled time and record the answers.

    Args:
        rows: what to send.
        schedule: one send time per row.
        target: where to.
        in_flight_max: requests at once; one that has to wait for a slot shows as schedule lag.
        wait_for_previous_turn: a follow-up is not due before the turn before it is answered, as
            with a person. Off, the load is purely open loop.
        pace: "closed_loop": a follow-up is due its think time after that answer, sooner or later
            than the schedule says, as in the policy lab (`loadgen.workloads.pacing`).
        on_progress: called a few times a second and once at the end.
        interrupt_signals: end the run early and return the records so far; requests in flight are
            recorded with the error "interrupted".

    Raises:
        EndpointError: the URL is none.
    """
    client = StreamingClient(target)
    run = _Replay(client, rows, in_flight_max)
    previous = previous_turns(rows) if wait_for_previous_turn else [None] * len(rows)
    steps = enumerate(plan(rows, pace))
    follow_ups = {index: step for index, step in steps if step.parent is not None}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as group:
            work = group.create_task(run.run(schedule, previous=previous, follow_ups=follow_ups))
            for number in interrupt_signals:
                loop.add_signal_handler(number, work.cancel)
            while not work.done():
                await asyncio.wait((work,), timeout=PROGRESS_INTERVAL_S)
                on_progress(run.progress())
    finally:
        for number in interrupt_signals:
            loop.remove_signal_handler(number)
        client.close()
    return ReplayResult(
        records=tuple(record for _, record in sorted(run.records.items())),
        interrupted=work.cancelled(),
    )
