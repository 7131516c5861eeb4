"""Request and snapshot -> decision. Pure: the same ones always give the same decision."""

import numpy as np
import numpy.typing as npt
import xxhash

from router.policies.base import Policy
from router.snapshot import Decision, FleetSnapshot, HotClass, RequestView, Scores

_MIX = np.uint64(0x9E3779B97F4A7C15)


def lottery(request: RequestView, fleet: FleetSnapshot) -> npt.NDArray[np.uint64]:
    """One number per instance, drawn from request id and instance id: the last tie-break.

    Depends on neither the order nor the number of instances, so routers agree on a request and
    different requests spread over equals.
    """
    drawn = (
        fleet.identity ^ np.uint64(xxhash.xxh3_64_intdigest(request.request_id.encode()))
    ) * _MIX
    return drawn ^ (drawn >> np.uint64(29))


def rank(
    scores: Scores, request: RequestView, fleet: FleetSnapshot, count: int
) -> npt.NDArray[np.intp]:
    """Places of the `count` best instances, best first.

    Order: score, then fewer new prefill tokens, then smaller batch, then the lottery.
    """
    assert scores.shape == (len(fleet.instances),), scores.shape
    assert not np.isnan(scores).any(), scores
    keys = (lottery(request, fleet), fleet.batch_size, fleet.new_prefill_tokens, scores)
    return np.lexsort(keys)[:count]


def shortlist(
    policy: Policy, request: RequestView, fleet: FleetSnapshot, count: int
) -> npt.NDArray[np.intp]:
    """Places of the `count` best instances, by the lottery.

    For whoever takes the best of them by the counters of another moment, equals by this order.
    """
    drawn = lottery(request, fleet)
    if len(drawn) <= count:
        return drawn.argsort()
    places = rank(policy(request, fleet), request, fleet, count)
    return places[drawn[places].argsort()]


def decide(
    policy: Policy,
    request: RequestView,
    snapshot: FleetSnapshot,
    *,
    place: int | None = None,
    booked_s: float | None = None,
    hot_class: HotClass | None = None,
) -> Decision:
    """Choose an instance.

    Args:
        policy: scores the instances.
        request: what is known of the request.
        snapshot: what is known of the fleet.
        place: the instance on which Redis has booked the request already, by the policy's own
            formula and later counters; None: the best by the snapshot.
        booked_s: wall clock of the booking; None when nothing is booked.
        hot_class: of the request, for the record.
    """
    scores = policy(request, snapshot)
    if place is None:
        place = int(rank(scores, request, snapshot, 1)[0])
    return Decision(
        policy=policy.name,
        snapshot=snapshot,
        scores=scores,
        index=place,
        booked_s=booked_s,
        hot_class=hot_class,
    )
