"""The highest rate that a fleet bears with a policy within bounds, by bisection.

The bounds are those by which loads are stated: P99 TTFT <= 10 s and mean TPOT <= 100 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from typing import Final

from loadgen.errors import LoadgenError
from loadgen.simulation.lab.cells import Cell, measure
from loadgen.simulation.lab.figures import RunFigures

RATE_FIRST: Final = 4.0
RATE_MIN: Final = 1e-3
RATE_MAX: Final = 1e5
"""Requests per second; what is outside is no fleet's capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What has to hold; None: does not matter.

    Attributes:
        tpot_mean_s: holds where no answer has a second token, as there is no TPOT then.
        slo_ratio: least share of requests within the workload's SLO.
    """

    ttft_p99_s: float | None = 10.0
    tpot_mean_s: float | None = 0.1
    slo_ratio: float | None = None

    def hold(self, seen: RunFigures) -> bool:
        """Whether a run kept all of them, and lost nothing."""
        return (
            seen.lost == 0
            and _within(seen.ttft_p99_s, self.ttft_p99_s)
            and (isnan(seen.tpot_mean_s) or _within(seen.tpot_mean_s, self.tpot_mean_s))
            and (self.slo_ratio is None or seen.slo_ratio >= self.slo_ratio)
        )


def _within(value: float, bound: float | None) -> bool:
    return bound is None or value <= bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The end of a search.

    Attributes:
        rate: the highest rate, in requests per second, at which the bounds held; 0 if at none.
        at_rate: the figures there; None if there is no such rate.
        tried: every rate, and whether the bounds held.
    """

    rate: float
    at_rate: RunFigures | None
    tried: tuple[tuple[float, bool], ...]


def find_capacity(
    cell: Cell,
    bounds: Bounds,
    *,
    accuracy_ratio: float = 0.02,
    on_run: Callable[[float, bool], None] = lambda _rate, _held: None,
) -> Found:
    """Double or halve from RATE_FIRST until the rate lies between two, then bisect.

    Args:
        cell: its rate and load do not matter.
        bounds: what has to hold.
        accuracy_ratio: the search ends when the bracket is that narrow.
        on_run: called after every run.

    Raises:
        LoadgenError: the workload cannot be made, or is over before it could overload anything.
    """
    tried: dict[float, bool] = {}
    best: RunFigures | None = None

    def holds(rate: float) -> bool:
        nonlocal best
        seen = measure(replace(cell, rate=rate, load=1.0))
        held = tried[rate] = bounds.hold(seen)
        if held and (best is None or rate > best.offered_rps):
            best = seen
        on_run(rate, held)
        return held

    low, high = 0.0, RATE_FIRST
    if holds(high):
        while high < RATE_MAX:
            low, high = high, high * 2
            if not holds(high):
                break
        else:
            raise LoadgenError(
                f"workload {cell.workload.name}: its requests are so few that the bounds hold at "
                "any rate; give it a larger requests_max or a longer trace, or state its capacity"
            )
    else:
        while high > RATE_MIN:
            low = high / 2
            if holds(low):
                break
            low, high = 0.0, low
    while low and high - low > accuracy_ratio * low:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return Found(rate=low, at_rate=best, tried=tuple(tried.items()))
