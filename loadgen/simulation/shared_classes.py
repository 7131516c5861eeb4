"""Classes of requests as the functions in Redis count and judge them (`classes_v1.lua`). Pure.

The twin of what `ts1_reserve`, `ts1_read` and `ts1_classes` do with them, with the time passed in.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from indexer.contract.limits import CLASS_PLACES, CLASS_WINDOW_S, CLASSES_MAX
from indexer.contract.request_classes import (
    ClassPrefixes,
    Saying,
    Standing,
    Told,
    Verdict,
    encode_recent,
)


@dataclass(slots=True)
class State:
    """Of a class that may be in trouble."""

    streak: int
    steered: int
    taken_out: bool
    told_s: float


class SharedClasses:
    """One fleet's counts and states.

    Attributes:
        states: hash of a prefix -> state, also of those that say nothing any more.
    """

    def __init__(self) -> None:
        self.states: dict[bytes, State] = {}
        self._windows: dict[int, npt.NDArray[np.int64]] = {}

    def count(self, prefixes: ClassPrefixes, now_s: float) -> None:
        """Count one booked request."""
        window = math.floor(now_s / CLASS_WINDOW_S)
        if window not in self._windows:
            kept = {at: counts for at, counts in self._windows.items() if abs(window - at) == 1}
            self._windows = kept | {window: np.zeros(CLASS_PLACES.stop, np.int64)}
        np.add.at(self._windows[window], _places(prefixes), 1)

    def judge(self, verdict: Verdict, now_s: float, *, lower: bool) -> None:
        """Note what a router says of a booked request's class; `lower`: it went to a holder."""
        if verdict.says is Saying.OVER:
            self.states.pop(verdict.name, None)
            return
        state = self._living(verdict.name, now_s)
        if verdict.says is Saying.STEERED:
            if state is None:
                return
            state.steered += 1
        else:
            if verdict.name not in self.states and not self._make_room(now_s):
                return
            state = state or State(0, 0, taken_out=False, told_s=now_s)
            state.streak = state.streak + 1 if lower else 0
            state.taken_out = state.taken_out or state.streak >= verdict.streak_least
        state.told_s = now_s
        self.states[verdict.name] = state

    def recent(self, prefixes: ClassPrefixes, now_s: float) -> Told:
        """What recent requests say of one that comes, as `RecentClasses.decode` reads it."""
        window = math.floor(now_s / CLASS_WINDOW_S)
        places = _places(prefixes)
        return encode_recent(
            1 - (now_s - window * CLASS_WINDOW_S) / CLASS_WINDOW_S,
            self._counts(window, places),
            self._counts(window - 1, places),
            [self._standing(prefixes.name(n), now_s) for n in range(len(prefixes))]
            if self.states
            else [],
        )

    def _standing(self, name: bytes, now_s: float) -> tuple[int, int]:
        state = self._living(name, now_s)
        if state is None:
            return 0, Standing.QUIET
        return state.streak, Standing.TAKEN_OUT if state.taken_out else Standing.WATCHED

    def _counts(self, window: int, places: npt.NDArray[np.int64]) -> list[int]:
        counts = self._windows.get(window)
        return [0] * len(places) if counts is None else counts[places].tolist()

    def _living(self, name: bytes, now_s: float) -> State | None:
        state = self.states.get(name)
        return None if state is None or state.told_s < now_s - CLASS_WINDOW_S else state

    def _make_room(self, now_s: float) -> bool:
        if len(self.states) >= CLASSES_MAX:
            living = {n: s for n, s in self.states.items() if self._living(n, now_s) is s}
            self.states = living
        return len(self.states) < CLASSES_MAX


def _places(prefixes: ClassPrefixes) -> npt.NDArray[np.int64]:
    """Counters of all requests and of each prefix."""
    return np.array([0, *prefixes.places], np.int64)
