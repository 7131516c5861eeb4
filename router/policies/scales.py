"""Columns brought to a common scale."""

import numpy as np
import numpy.typing as npt

from router.snapshot import Column, FleetSnapshot, RequestView

Shares = npt.NDArray[np.float64]
"""Between 0 and 1, one per instance."""


def tie_break(column: npt.NDArray[np.float64] | Column) -> Shares:
    """At least 0 and below 1, in the order of the column: added to whole numbers, breaks ties.

    Args:
        column: none below 0.
    """
    shares: Shares = column / (column.max() + 1)
    return shares


def min_max(column: npt.NDArray[np.float64] | Column) -> Shares:
    """0 for the least of this decision, 1 for the largest; 0 for all where all are equal."""
    least, most = column.min(), column.max()
    if least == most:
        return np.zeros(len(column))
    shares: Shares = (column - least) / (most - least)
    return shares


def held_tokens(request: RequestView, fleet: FleetSnapshot) -> npt.NDArray[np.float64]:
    """Tokens whose KV$ an instance's requests hold, as its engine last reported   [token].

    KV$ usage x capacity; where the capacity is not known, this prompt for each of its requests.
    """
    capacity = np.array([record.capacity_blocks or 0 for record in fleet.instances], np.int64)
    reported = fleet.kv_usage_ratio * capacity * fleet.block_size_tokens
    return np.where(capacity > 0, reported, fleet.batch_size * float(request.prompt_tokens))
