"""The contract of a policy."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from router.snapshot import FleetSnapshot, RequestView

Scores = npt.NDArray[np.float64]
"""Shape (instances,), one per `fleet.instances`, same order; lower is better; infinite = never."""


class Policy(Protocol):
    """A pure function from what is known to a cost per instance."""

    @property
    def name(self) -> str:
        """As operators spell it."""
        ...

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance of the snapshot; no I/O, no clock, no randomness."""
        ...
