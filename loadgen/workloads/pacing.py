"""Pure: what is sent when, by timestamp or in closed loop within sessions, at a wanted rate.

Time is whatever the caller says it is, so a fleet in virtual time and a replay against a URL use
the same `Pacer`: ask it what is due, tell it what has been answered.

- "timestamps": every request is due at its arrival, whatever happens to the others.
- "closed_loop": a first request is due at its arrival; one that continues another is due a think
  time after that one's answer has ended. The think time is the trace's own where it states one;
  else the gap between the two arrivals less the time that the answer is assumed to have taken.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loadgen.conversations import previous_turns
from loadgen.errors import WorkloadError
from loadgen.trace_row import TraceRow

Pace = Literal["timestamps", "closed_loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTime:
    """How long an answer is assumed to have taken when the trace was recorded.

    Args:
        ttft_s: time to first token.
        tpot_s: time per further token.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.03

    def of(self, row: TraceRow) -> float:
        """Seconds from sending the row to the end of its answer."""
        return self.ttft_s + self.tpot_s * (row.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """When one row is due.

    Args:
        parent: row whose answer it waits for; None: it waits for nobody.
        after_s: seconds after the parent's answer, or from the start when there is no parent.
        not_before_s: from the start; a row whose parent has answered earlier waits until then.
    """

    parent: int | None
    after_s: float
    not_before_s: float = 0.0


def plan(
    rows: Sequence[TraceRow], pace: Pace, *, answer_time: AnswerTime = AnswerTime()
) -> tuple[Step, ...]:
    """One step per row, in the order of the rows, which rise by arrival."""
    if pace == "timestamps":
        return tuple(Step(parent=None, after_s=row.arrival_s) for row in rows)
    steps: list[Step] = []
    for row, parent in zip(rows, previous_turns(rows), strict=True):
        if parent is None:
            steps.append(Step(parent=None, after_s=row.arrival_s))
            continue
        gap_s = row.arrival_s - rows[parent].arrival_s
        derived_s = max(0.0, gap_s - answer_time.of(rows[parent]))
        think_s = derived_s if row.think_s is None else row.think_s
        steps.append(Step(parent=parent, after_s=think_s))
    return tuple(steps)


class Pacer:
    """Hands out the rows of a plan when they are due.

    Args:
        steps: of `plan`.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._children: dict[int, list[int]] = {}
        self._due: list[tuple[float, int]] = []
        for index, step in enumerate(steps):
            if step.parent is None:
                self._due.append((step.after_s, index))
            else:
                self._children.setdefault(step.parent, []).append(index)
        heapq.heapify(self._due)
        self._left_count = len(steps)

    @property
    def next_due_s(self) -> float | None:
        """When the next known row is due; None while all left wait for answers, or none is left."""
        return self._due[0][0] if self._due else None

    @property
    def left_count(self) -> int:
        """Rows not yet handed out."""
        return self._left_count

    def take(self, now_s: float) -> list[int]:
        """The rows due by now, in order of their times (row order among equals), each once."""
        taken: list[int] = []
        while self._due and self._due[0][0] <= now_s:
            taken.append(heapq.heappop(self._due)[1])
        self._left_count -= len(taken)
        return taken

    def answered(self, index: int, now_s: float) -> None:
        """The answer to a row has ended, or failed: those who waited for it become due.

        To be called once for every row taken. A session goes on after a failure, as a person does
        who tries again.
        """
        for child in self._children.pop(index, ()):
            step = self._steps[child]
            heapq.heappush(self._due, (max(now_s + step.after_s, step.not_before_s), child))


def rescale(rows: Sequence[TraceRow], *, request_rate: float) -> tuple[TraceRow, ...]:
    """The rows with sessions that begin more or less often; what is within a session stays.

    Session starts are stretched by one factor, gaps within sessions are kept: people do not think
    faster because more of them come. Sessions then begin at such a rate that, in the long run,
    `request_rate` requests arrive per second; a trace shorter than its sessions shows less than
    that at its beginning and has a thin tail at its end. In closed loop the fleet's answers decide
    when follow-ups come, the rate of session starts is what is set.

    Args:
        rows: by rising arrival.
        request_rate: requests per second.

    Raises:
        WorkloadError: all sessions begin at the same time, which no stretching changes.
    """
    roots: list[int] = []
    for index, parent in enumerate(previous_turns(rows)):
        roots.append(index if parent is None else roots[parent])
    starts_s = sorted({root: rows[root].arrival_s for root in roots}.values())
    span_s = starts_s[-1] - starts_s[0] if starts_s else 0.0
    if span_s <= 0:
        raise WorkloadError(
            "request_rate: all sessions of the trace begin at the same time; take more of it"
        )
    sessions_per_s = request_rate * len(starts_s) / len(rows)
    factor = (len(starts_s) - 1) / sessions_per_s / span_s
    moved = []
    for row, root in zip(rows, roots, strict=True):
        start_s = rows[root].arrival_s
        moved_s = (start_s - starts_s[0]) * factor + row.arrival_s - start_s
        moved.append(replace(row, arrival_s=round(moved_s, 6)))
    return tuple(sorted(moved, key=lambda row: row.arrival_s))
