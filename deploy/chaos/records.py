"""Pure: what became of each request, and which failures a fault accounts for."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    OK = "ok"
    LEFT = "left"  # the client itself hung up, as it was told to
    ANSWERED_ERROR = "answered-error"  # an HTTP status other than 200
    BROKEN = "broken"  # the connection ended before the answer did
    LATE = "late"  # no whole answer within the client's deadline
    NOWHERE = "nowhere"  # no router took it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are the load's monotonic seconds.

    Attributes:
        request_id: the client's.
        router: name of the router that took it; None when none did.
        instance_id: who answered, told by the router with the first byte; None before that.
        streamed: whether tokens were to come one by one.
        sent_s: when the client began.
        first_byte_s: when the answer began; None if it did not.
        ended_s: when it was over.
        outcome: how it ended.
        status: HTTP status, if there was one.
        detail: for a person.
    """

    request_id: str
    router: str | None
    instance_id: str | None
    streamed: bool
    sent_s: float
    first_byte_s: float | None
    ended_s: float
    outcome: Outcome
    status: int | None = None
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the client got no whole answer although it waited for one."""
        return self.outcome not in {Outcome.OK, Outcome.LEFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """What a fault may cost: requests that the killed or faulty part itself carried.

    Attributes:
        cause: for a person.
        since_s: requests that had ended before are not its.
        until_s: requests that were sent later are not its.
        router: the request was with this router.
        instance_id: the answer came from this instance, so it had begun.
        broken: answers may break off.
        statuses: HTTP answers that the part itself gives.
        request_ids: only these, where the part knows whom it hit.
    """

    cause: str
    since_s: float
    until_s: float
    router: str | None = None
    instance_id: str | None = None
    broken: bool = False
    statuses: frozenset[int] = frozenset()
    request_ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """An excuse names a part."""
        assert self.router is not None or self.instance_id is not None, self.cause

    def covers(self, record: RequestRecord) -> bool:
        """Whether this explains how a request failed."""
        if record.ended_s < self.since_s or record.sent_s > self.until_s:
            return False
        if self.router is not None and record.router != self.router:
            return False
        if self.instance_id is not None and record.instance_id != self.instance_id:
            return False
        if self.request_ids is not None and record.request_id not in self.request_ids:
            return False
        if record.outcome is Outcome.BROKEN:
            return self.broken
        return record.outcome is Outcome.ANSWERED_ERROR and record.status in self.statuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Requests of one fault, counted.

    Attributes:
        requests: all of them.
        failed: without a whole answer although the client waited.
        failed_explained: of those, the ones a part that was killed or faulty carried itself.
        clients_left: that hung up, which is no failure.
        causes: how many failures each cause explains.
        unexplained: the rest, for a person.
        ttft_p99_s: of the answers that began.
    """

    requests: int
    failed: int
    failed_explained: int
    clients_left: int
    causes: dict[str, int]
    unexplained: tuple[str, ...]
    ttft_p99_s: float


UNEXPLAINED_TOLD_MAX = 20


def tally(records: Sequence[RequestRecord], excuses: Iterable[Excuse]) -> Tally:
    """Count requests and judge every failure."""
    known = tuple(excuses)
    causes: Counter[str] = Counter()
    unexplained = []
    for record in records:
        if not record.failed:
            continue
        cause = next((one.cause for one in known if one.covers(record)), None)
        if cause is None:
            unexplained.append(_told(record))
        else:
            causes[cause] += 1
    ttfts = sorted(r.first_byte_s - r.sent_s for r in records if r.first_byte_s is not None)
    return Tally(
        requests=len(records),
        failed=sum(record.failed for record in records),
        failed_explained=causes.total(),
        clients_left=sum(record.outcome is Outcome.LEFT for record in records),
        causes=dict(causes),
        unexplained=tuple(unexplained[:UNEXPLAINED_TOLD_MAX]),
        ttft_p99_s=ttfts[int(0.99 * (len(ttfts) - 1))] if ttfts else 0.0,
    )


def _told(record: RequestRecord) -> str:
    kind = "streamed" if record.streamed else "plain"
    status = f" {record.status}" if record.status is not None else ""
    return (
        f"{record.request_id} ({kind}) {record.outcome}{status} after "
        f"{record.ended_s - record.sent_s:.2f} s; router {record.router}, "
        f"instance {record.instance_id}; {record.detail}"
    )
