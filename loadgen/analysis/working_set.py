"""Pure: how many tokens of blocks are in use, over time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.analysis.history import Requests
from loadgen.analysis.reuse import Reuses

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOMENTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One of MOMENTS equal parts of a trace.

    Attributes:
        end_s: of it, from the first arrival.
        touched_tokens: of distinct blocks touched in it.
        seen_tokens: of distinct blocks touched until its end.
        wanted_tokens: of blocks that are touched again after its end: what a cache with the ideal
            hit ratio holds at least.
    """

    end_s: float
    touched_tokens: int
    seen_tokens: int
    wanted_tokens: int


def working_set(
    requests: Requests, reuses: Reuses, moments_count: int = MOMENTS
) -> tuple[Moment, ...]:
    """The working set in equal parts of the trace's time; one part where that is 0."""
    since_s = requests.arrival_s - requests.arrival_s[0]
    count = moments_count if since_s[-1] > 0 else 1
    ends_s = np.linspace(0, since_s[-1], count + 1)[1:]
    part = np.searchsorted(ends_s, since_s).clip(max=count - 1)
    sizes = requests.block_size_tokens
    reused = reuses.length * sizes[reuses.reuser]
    new = requests.blocks * sizes - np.bincount(reuses.reuser, reused, len(requests))
    came, left = part[reuses.toucher], part[reuses.reuser]
    touched = np.bincount(part, new, count) + np.bincount(left, reused * (came < left), count)
    wanted = np.cumsum(np.bincount(came, reused, count) - np.bincount(left, reused, count))
    seen = np.cumsum(np.bincount(part, new, count))
    return tuple(
        Moment(
            end_s=float(end_s),
            touched_tokens=int(touched[place]),
            seen_tokens=int(seen[place]),
            wanted_tokens=int(wanted[place]),
        )
        for place, end_s in enumerate(ends_s)
    )
