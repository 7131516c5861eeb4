"""What a virtual fleet is asked: rows as chains of blocks, and what routers see of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.conversations import previous_turns
from loadgen.simulation.chains import chain_requests
from loadgen.trace_row import TraceRow
from loadgen.workloads.pacing import Pace, Step, plan
from workers.simulated.eviction.base import Category
from workers.simulated.fast.request import ChainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests of one run; all sequences have one entry per request.

    Attributes:
        requests: named by their place; their category is the row's and the turn.
        steps: when each is due.
        nominal_s: when each would arrive if answers took the time that the rows assume.
        turns: earlier answers in the prompt.
        sessions: the place of the first request of the session.
        history_tokens: of the prompt, what its parent and the answer to that were; None: no parent
            is known. Empty: of none.
        identities_count: block identities are below it.
    """

    requests: Sequence[ChainRequest]
    steps: Sequence[Step]
    nominal_s: Sequence[float]
    turns: Sequence[int]
    sessions: Sequence[int]
    identities_count: int
    history_tokens: Sequence[int | None] = ()

    def history_of(self, place: int) -> int | None:
        """Of a request's prompt, what was there before."""
        return self.history_tokens[place] if self.history_tokens else None

    @property
    def root_arrivals_s(self) -> list[float]:
        """When sessions begin, ascending."""
        return sorted(step.after_s for step in self.steps if step.parent is None)


def demanded(rows: Sequence[TraceRow], *, pace: Pace, block_size_tokens: int) -> Demand:
    """What rows with block ids ask of engines of such blocks.

    Args:
        rows: by rising arrival.
        pace: "closed_loop" or "timestamps"; see `loadgen.workloads.pacing`.
        block_size_tokens: of the engines; divides the rows'.

    Raises:
        ValueError: a row has no block ids, or blocks of a size the engine's does not divide.
    """
    previous = previous_turns(rows)
    requests = chain_requests(rows, block_size_tokens=block_size_tokens, previous=previous)
    turns: list[int] = []
    sessions: list[int] = []
    history: list[int | None] = []
    for place, (row, parent) in enumerate(zip(rows, previous, strict=True)):
        counted = 0 if parent is None else turns[parent] + 1
        turns.append(counted if row.turn is None else row.turn)
        sessions.append(place if parent is None else sessions[parent])
        history.append(None if parent is None else _history(requests[parent], requests[place]))
    largest = max((int(np.max(r.blocks, initial=-1)) for r in requests), default=-1)
    return Demand(
        requests=[
            replace(request, category=Category(row.category or "", turn))
            for request, row, turn in zip(requests, rows, turns, strict=True)
        ],
        steps=plan(rows, pace),
        nominal_s=[row.arrival_s for row in rows],
        turns=turns,
        sessions=sessions,
        identities_count=largest + 1,
        history_tokens=history,
    )


def _history(before: ChainRequest, request: ChainRequest) -> int:
    return min(before.prompt_tokens + before.output_tokens, request.prompt_tokens)
