"""Instances that a request names as the only ones that may be chosen. Pure."""

from typing import Final

import numpy as np

from router import headers as names
from router.eligibility import take
from router.errors import NoEligibleInstance, RequestInvalid
from router.snapshot import FleetSnapshot

NAMES_MAX: Final = 256
"""A header that is longer names a policy, not instances."""


def asked_instances(header: str | None) -> frozenset[str]:
    """What a header names; empty without one.

    Raises:
        RequestInvalid: there is a header, and it names none, or too many.
    """
    if header is None:
        return frozenset()
    asked = frozenset(filter(None, map(str.strip, header.split(","))))
    if not 0 < len(asked) <= NAMES_MAX:
        raise RequestInvalid(
            f"{names.ASKED_INSTANCES}: must name 1 to {NAMES_MAX} instances, as `GET /fleet` does, "
            "separated by commas.",
            param=names.ASKED_INSTANCES,
        )
    return asked


def among_asked(snapshot: FleetSnapshot, asked: frozenset[str]) -> FleetSnapshot:
    """Those of the instances that are named; all of them where none is.

    An instance is named by its id, or by the part in front of `#`, which outlives restarts.

    Raises:
        NoEligibleInstance: none of those named may be chosen now.
    """
    if not asked:
        return snapshot
    places = [
        i
        for i, one in enumerate(snapshot.instances)
        if one.instance_id in asked or one.instance_id.partition("#")[0] in asked
    ]
    if not places:
        raise NoEligibleInstance(
            f"{names.ASKED_INSTANCES}: of the instances named none can take this request now. "
            "`GET /fleet` says which there are, and what is wrong with them."
        )
    return take(snapshot, np.array(places, np.intp))
