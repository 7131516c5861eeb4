"""Pure: who reuses what of whom, in one pass over the requests in order of arrival.

A run of blocks that a request (`toucher`) was the last to touch and a later one (`reuser`) touches
again is one reuse. Later prompts touch leading parts, so a request's blocks that nobody has touched
since are a trailing part of its prompt, and its prompt's runs have ever older touchers. There are
at most two runs a request: each either ends what its toucher had left, or is the reuser's last.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.analysis.block_numbers import Numbers
from loadgen.analysis.history import NO_SESSION, Requests

Ints = npt.NDArray[np.int64]

_NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuses:
    """Every run of reused blocks, ordered by reuser and by place in its prompt, and who is who.

    Attributes:
        toucher: request that touched the run last before, an index by arrival.
        reuser: request that touches it now.
        start: place of the run's first block in both prompts.
        length: its blocks.
        above_tokens: tokens of distinct blocks touched after the run's first block: what a cache
            that keeps the latest has to hold besides it.
        session: of each request; unlabelled ones have the conversation that they continue.
        turn: of each request, from 0: labelled, else its place in the session.
        touches: of each block.
        first_touch, last_touch: of each block, requests.
    """

    toucher: Ints
    reuser: Ints
    start: Ints
    length: Ints
    above_tokens: Ints
    session: Ints
    turn: Ints
    touches: Numbers
    first_touch: Numbers
    last_touch: Numbers


def find_reuses(
    requests: Requests, paths: Iterable[Numbers], on_request: Callable[[], None] | None = None
) -> Reuses:
    """Every reuse of a trace.

    Args:
        requests: in order of arrival.
        paths: block numbers of each prompt, in the same order.
        on_request: called after each.
    """
    last_touch = np.full(requests.distinct_blocks, _NEVER, np.int32)
    first_touch = np.full(requests.distinct_blocks, _NEVER, np.int32)
    touches = np.zeros(requests.distinct_blocks, np.int32)
    stack, sessions = _Stack(len(requests)), _Sessions(requests)
    columns = tuple(array("q") for _ in range(5))
    sizes = requests.block_size_tokens.tolist()
    for request, path in enumerate(paths):
        before = last_touch[path]
        known = int(np.count_nonzero(before >= 0))
        if known:
            edges = np.flatnonzero(before[1:known] != before[: known - 1]) + 1
            starts = [0, *edges.tolist()]
            ends = [*starts[1:], known]
            runs = list(zip(starts, ends, before[starts].tolist(), strict=True))
            for start, end, toucher in runs:
                values = (toucher, request, start, end - start, stack.above_tokens(toucher))
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
            # Only now: a request finds what is there before its own blocks change the order.
            for start, end, toucher in runs:
                stack.add(toucher, -(end - start) * sizes[toucher])
        stack.add(request, len(path) * sizes[request])
        first_touch[path[known:]] = request
        last_touch[path] = request
        touches[path] += 1
        sessions.place(request, path)
        if on_request is not None:
            on_request()
    found = [np.array(column, np.int64) for column in columns]
    return Reuses(
        toucher=found[0],
        reuser=found[1],
        start=found[2],
        length=found[3],
        above_tokens=found[4],
        session=np.array(sessions.session, np.int64),
        turn=np.array(sessions.turn, np.int64),
        touches=touches,
        first_touch=first_touch,
        last_touch=last_touch,
    )


class _Stack:
    """Tokens of blocks by who touched them last: a Fenwick tree over requests by arrival."""

    def __init__(self, requests_count: int) -> None:
        self._tree = [0] * (requests_count + 1)
        self._all = 0

    def add(self, request: int, tokens: int) -> None:
        self._all += tokens
        place = request + 1
        while place < len(self._tree):
            self._tree[place] += tokens
            place += place & -place

    def above_tokens(self, request: int) -> int:
        """Of blocks touched last by later requests."""
        place, below = request + 1, 0
        while place:
            below += self._tree[place]
            place &= place - 1
        return self._all - below


class _Sessions:
    """Sessions and turns; of unlabelled requests as `loadgen.conversations` finds them.

    An unlabelled request continues the latest earlier one all of whose blocks it begins with,
    provided those are more than what all unlabelled prompts share.
    """

    def __init__(self, requests: Requests) -> None:
        self.session = array("q")
        self.turn = array("q")
        self._labelled = requests.session.tolist()
        self._turns = requests.turn.tolist()
        self._ignored = requests.common_blocks
        self._next_session = requests.sessions_count
        self._next_turn: dict[int, int] = {}
        unlabelled = NO_SESSION in self._labelled
        self._last_end = np.full(requests.distinct_blocks if unlabelled else 0, _NEVER, np.int32)

    def place(self, request: int, path: Numbers) -> None:
        session = self._labelled[request]
        if session == NO_SESSION:
            session = self._continued(request, path)
        turn = self._turns[request]
        if turn < 0:
            turn = self._next_turn.get(session, 0)
        self._next_turn[session] = turn + 1
        self.session.append(session)
        self.turn.append(turn)

    def _continued(self, request: int, path: Numbers) -> int:
        before = int(self._last_end[path[self._ignored :]].max(initial=_NEVER))
        if len(path) > self._ignored:
            self._last_end[path[-1]] = request
        if before != _NEVER:
            return self.session[before]
        self._next_session += 1
        return self._next_session - 1
