"""The fault list, by kind; `CASES` in the order in which they are done."""

from collections.abc import Sequence

from deploy.chaos.faults import clients, clock, engines, membership, redis, routers, sidecars
from deploy.chaos.faults.base import FaultCase

CASES: tuple[type[FaultCase], ...] = (
    *clients.CASES,
    *engines.CASES,
    *sidecars.CASES,
    *routers.CASES,
    *redis.CASES,
    *membership.CASES,
    *clock.CASES,
)


def by_name(names: Sequence[str]) -> tuple[type[FaultCase], ...]:
    """Faults of these names, in this order; all when there are none.

    Raises:
        ValueError: a name is unknown; lists the known ones.
    """
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"faults: no {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or CASES
