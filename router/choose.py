"""Scores -> order of preference. Pure: the same request and fleet always give the same order."""

import numpy as np
import numpy.typing as npt
import xxhash

from router.snapshot import FleetSnapshot, RequestView, Scores

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
