"""The contract of a policy."""

from typing import Protocol

from router.snapshot import FleetSnapshot, RequestView, Scores


class Policy(Protocol):
    """A pure function from what is known to a cost per instance: no I/O, clock or randomness."""

    @property
    def name(self) -> str:
        """As operators spell it."""
        ...

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance of the snapshot; lower is better, infinite is never."""
        ...
