"""Pure: results of faults, what makes a run fail, and the summary file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """What one fault cost.

    Attributes:
        name: of the fault.
        requests: sent while it and its aftermath lasted.
        failed: of those, without a whole answer although the client waited.
        failed_explained: of those, carried by the killed or faulty part itself.
        recovery_s: from the fault's end until the fleet was whole; None: not within the deadline.
        counters_zero: every counter was zero and every key owned, in time after the load's end.
        skipped: why it was not done; None when it was.
        trouble: what was wrong, for a person.
        causes: explained failures by cause.
        unexplained: the first of the other failures.
        clients_left: clients that hung up, which is no failure.
        audit_differences_max: most slots whose counters differed from the ledgers at one moment.
        audit_samples: how often that was looked at.
        ttft_p99_s: at the clients, of all answers that began.
        notes: what else the fault has to tell.
    """

    name: str
    requests: int = 0
    failed: int = 0
    failed_explained: int = 0
    recovery_s: float | None = None
    counters_zero: bool = False
    skipped: str | None = None
    trouble: tuple[str, ...] = ()
    causes: dict[str, int] = field(default_factory=dict)
    unexplained: tuple[str, ...] = ()
    clients_left: int = 0
    audit_differences_max: int = 0
    audit_samples: int = 0
    ttft_p99_s: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Failures that nothing explains."""
        return self.failed - self.failed_explained

    @property
    def passed(self) -> bool:
        """Whether it cost nothing that it must not cost; true when it was skipped."""
        if self.skipped is not None:
            return True
        return (
            self.lost == 0
            and self.recovery_s is not None
            and self.counters_zero
            and self.audit_samples > 0  # books nobody could look at prove nothing
            and self.audit_differences_max == 0
            and not self.trouble
        )


def exit_code(results: Sequence[FaultResult]) -> int:
    """0 when something was done and all passed, else 1."""
    done = [one for one in results if one.skipped is None]
    return 0 if done and all(one.passed for one in done) else 1


def as_json(results: Sequence[FaultResult], *, seed: int, rate: float) -> dict[str, Any]:
    """The summary file."""
    return {
        "faults": [{**asdict(one), "passed": one.passed} for one in results],
        "seed": seed,
        "rate": rate,
        "requests": sum(one.requests for one in results),
        "failed": sum(one.failed for one in results),
        "failed_explained": sum(one.failed_explained for one in results),
        "passed": exit_code(results) == 0,
    }
