"""Pure: open-loop schedules. A schedule is one send time per request, in seconds from the start.

Open loop means that a send time never depends on an answer, so a slow fleet cannot slow the load
down and flatter itself. Schedules rise and start at 0.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from loadgen.errors import SliceError

Schedule = tuple[float, ...]


def replay(arrivals_s: Sequence[float], *, request_rate: float | None = None) -> Schedule:
    """The trace's own arrivals, shifted to 0 and, with a rate, stretched to it.

    Args:
        arrivals_s: rising arrivals.
        request_rate: requests per second wanted between first and last; None keeps the trace's.

    Raises:
        SliceError: a rate is asked of arrivals that all coincide, which no stretching can give.
    """
    assert all(before <= after for before, after in pairwise(arrivals_s)), "arrivals must rise"
    if not arrivals_s:
        return ()
    offsets = [arrival - arrivals_s[0] for arrival in arrivals_s]
    if request_rate is None or len(offsets) == 1:
        return tuple(offsets)
    if offsets[-1] == 0:
        raise SliceError("all rows arrive at the same time; use constant or poisson arrivals")
    scale = (len(offsets) - 1) / request_rate / offsets[-1]
    return tuple(offset * scale for offset in offsets)


def poisson(requests_count: int, *, request_rate: float, seed: int) -> Schedule:
    """Exponential gaps with mean 1 / request_rate, reproducible from the seed."""
    assert request_rate > 0, request_rate
    if requests_count == 0:
        return ()
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, requests_count - 1)
    return (0.0, *np.cumsum(gaps).tolist())


def constant(requests_count: int, *, request_rate: float) -> Schedule:
    """Equal gaps of 1 / request_rate."""
    assert request_rate > 0, request_rate
    return tuple(index / request_rate for index in range(requests_count))


def rate(schedule: Sequence[float]) -> float:
    """Requests per second between the first and the last send; 0 when there is no span."""
    span_s = schedule[-1] - schedule[0] if schedule else 0.0
    return (len(schedule) - 1) / span_s if span_s > 0 else 0.0
