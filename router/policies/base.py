"""The contract of a policy, and of one that remembers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from router.snapshot import Decision, FleetSnapshot, RequestView, Scores


class Policy(Protocol):
    """A pure function from what is known to a cost per instance: no I/O, clock or randomness."""

    @property
    def name(self) -> str:
        """As operators spell it."""
        ...

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance of the snapshot; lower is better, infinite is never."""
        ...


class Memory(Protocol):
    """What one router remembers of its own decisions, bounded in entries and in time.

    Its clock is given to it (`Remembers.remembering`). Both calls are O(1), repeats change nothing.
    """

    def decided(self, request: RequestView, decision: Decision) -> None:
        """An instance was chosen and booked; for a retry, another one."""
        ...

    def ended(self, request: RequestView, decision: Decision, decode_s: float | None) -> None:
        """The request has left that instance, however.

        Args:
            request: as it was decided.
            decision: as it was told.
            decode_s: from its first token to its last; None when only the end is known.
        """
        ...


@runtime_checkable
class Remembers(Policy, Protocol):
    """A rule that scores by a memory as well; called without one it has an empty one."""

    def remembering(self, clock: Callable[[], float]) -> "Remembering":
        """The rule with a memory of its own, for one router.

        Args:
            clock: monotonic seconds; virtual ones in a simulation.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembering:
    """A rule bound to the memory of one router.

    Attributes:
        name: as operators spell it.
        memory: is told of this router's decisions and their ends.
        score: the rule over that memory, which it only reads.
    """

    name: str
    memory: Memory
    score: Callable[[RequestView, FleetSnapshot], Scores]

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        return self.score(request, fleet)


def for_router(policy: Policy, clock: Callable[[], float]) -> Policy:
    """The policy as one router uses it: with a memory of its own, if it has any, by this clock."""
    return policy.remembering(clock) if isinstance(policy, Remembers) else policy


def tell_decided(policy: Policy, request: RequestView, decision: Decision) -> None:
    """Tell a policy that remembers of a decision."""
    if isinstance(policy, Remembering):
        policy.memory.decided(request, decision)


def tell_ended(
    policy: Policy, request: RequestView, decision: Decision, decode_s: float | None = None
) -> None:
    """Tell a policy that remembers of a decision's end; see `Memory.ended`."""
    if isinstance(policy, Remembering):
        policy.memory.ended(request, decision, decode_s)
