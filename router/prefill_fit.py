"""What prefill costs on a device, from the prefills that a router has seen. Pure.

seconds = fixed + c_lin n + c_attn n (L - n / 2), for n uncached tokens of a prompt of L tokens. The
fixed part is what every request pays wherever it goes (network, a step's overhead); it is fitted,
so that it does not pass for tokens, and left out.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from router.snapshot import Decision, PrefillCost

WINDOW: Final = 256
"""Latest prefills that count: a device that has changed is known again after so many."""

OBSERVATIONS_MIN: Final = 32
"""Before so many nothing is told."""

REFIT_EVERY: Final = WINDOW // 2
"""New prefills after which the fit is made again, and before there are so many, when half of all
are new; in between the last one holds. It takes 2 ms of the event loop, whatever the policy: more
often would be a tenth of a router's core at 1,500 requests a second."""

QUEUED_RATIO_MAX: Final = 0.1
"""A prefill behind more than this share of its own tokens says little: how much of the queue was
computed already nobody knows."""

SECONDS_MAX: Final = 600.0
LINEAR_MIN_S, LINEAR_MAX_S = 1e-8, 1.0
ATTENTION_MAX_S: Final = 1e-3
"""Bounds of what is told: 100 million tokens a second are not possible, nor is one."""

_ROUNDS: Final = 12
_FLOOR_S: Final = 0.005
"""A router's clock and network are not better than this, so residuals below it count alike."""

_CLOSE: Final = 0.01
"""Relative residuals below this weigh alike."""

_TERMS: Final = 3
_CHOICES: Final = [
    (list(kept), np.ix_(kept, kept))
    for count in range(_TERMS, 0, -1)
    for kept in itertools.combinations(range(_TERMS), count)
]
_RIDGE: Final = 1e-9
"""Terms that cannot be told apart, as of prompts of one length, share what they explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPrefill:
    """One prefill.

    Attributes:
        prompt_tokens: L.
        new_prefill_tokens: n, those that were not found in the KV$.
        queued_prefill_tokens: waiting there when it was sent.
        queued_context_tokens: that each of those attends to, on average.
        seconds: from its dispatch to its first byte.
        slowness: of its device against the fastest one, 1 or more.
    """

    prompt_tokens: int
    new_prefill_tokens: int
    queued_prefill_tokens: int
    queued_context_tokens: int
    seconds: float
    slowness: float = 1.0

    @classmethod
    def of(
        cls, decision: Decision, *, seconds: float, cached_tokens: int | None
    ) -> "SeenPrefill | None":
        """From a decision and what came of it; None where it does not say what was computed.

        Args:
            decision: of the request, alone with one prompt.
            seconds: since it was sent.
            cached_tokens: what its engine says it found; None: nothing, and the prediction counts.
        """
        snapshot = decision.snapshot
        if decision.degraded or decision.approximate or decision.tier_tokens:
            return None  # lengths, queues or what was computed are not known
        prompt_tokens, new_tokens = decision.prompt_tokens, decision.new_prefill_tokens
        if cached_tokens is not None:
            new_tokens = prompt_tokens - cached_tokens
        slowness = 1000 if snapshot.slowness is None else snapshot.slowness[decision.index]
        return cls(
            prompt_tokens=prompt_tokens,
            new_prefill_tokens=new_tokens,
            queued_prefill_tokens=decision.queued_prefill_tokens,
            queued_context_tokens=int(snapshot.queued_context_tokens[decision.index]),
            seconds=seconds,
            slowness=float(slowness) / 1000,
        )


class PrefillFit:
    """The constants of one model on one kind of device: the latest prefills and a robust fit.

    Minimised is the sum of absolute residuals, each relative to what was seen or expected,
    whichever is more, with no coefficient below 0. So no prefill weighs much more than another,
    and many may be wrong: too long, because they waited for something that nobody counted, or too
    short, because more was held than was known.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._new = 0
        self.cost: PrefillCost | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, seen: SeenPrefill) -> bool:
        """Take a prefill into account; False for one that says nothing."""
        new, queued = seen.new_prefill_tokens, seen.queued_prefill_tokens
        possible = 0 < new <= seen.prompt_tokens and 0 < seen.seconds <= SECONDS_MAX
        if not possible or seen.slowness <= 0 or queued > QUEUED_RATIO_MAX * new:
            return False
        pairs = new * (seen.prompt_tokens - new / 2) + queued * seen.queued_context_tokens
        self._rows.append((1.0, new + queued, pairs, seen.seconds / seen.slowness))
        self._new += 1
        if self._new >= min(REFIT_EVERY, max(OBSERVATIONS_MIN, len(self._rows) // 2)):
            self.cost, self._new = self._fitted(), 0
        return True

    def _fitted(self) -> PrefillCost:
        rows = np.array(self._rows)
        terms, seconds = rows[:, :_TERMS], rows[:, _TERMS]
        scale = terms.mean(axis=0)
        coefficients = _least_absolute(terms / scale, seconds) / scale
        _, linear, attention = coefficients.tolist()
        return PrefillCost(
            linear_s_per_token=min(max(linear, LINEAR_MIN_S), LINEAR_MAX_S),
            attention_s_per_pair=min(attention, ATTENTION_MAX_S),
        )


def _least_absolute(
    terms: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Coefficients of the least sum of relative absolute residuals, by reweighted squares.

    Args:
        terms: shape (prefills, _TERMS), each of mean 1.
        seconds: shape (prefills,).
    """
    weights = terms.sum(axis=1) ** -2.0  # at first relative to what there is to do
    found = np.zeros(_TERMS)
    for _ in range(_ROUNDS):
        weighted = terms * weights[:, None]
        found = _least_squares(weighted.T @ terms, weighted.T @ seconds)
        expected = terms @ found
        relative = 1.0 / (np.maximum(seconds, expected) + _FLOOR_S)
        weights = relative**2 / np.maximum(np.abs(expected - seconds) * relative, _CLOSE)
    return found


def _least_squares(
    gram: npt.NDArray[np.float64], right: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """None below 0: the best of the solutions that leave out some terms, which are few."""
    gram = gram + np.diag(gram.diagonal() * _RIDGE)
    best, best_value = np.zeros(_TERMS), 0.0
    for kept, block in _CHOICES:
        solved = np.linalg.solve(gram[block], right[kept])
        if min(solved.tolist()) < 0:
            continue
        value = -float(solved @ right[kept])
        if value < best_value:
            best, best_value = np.zeros(_TERMS), value
            best[kept] = solved
        if len(kept) == _TERMS:
            break  # nothing that leaves out a term is better
    return best
