"""Snapshot to reservation arguments, and the reservation's answer to snapshot. Pure."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from indexer.contract import reservations
from indexer.contract.milestones import Milestones
from indexer.contract.reservations import InFlight
from router.snapshot import FleetSnapshot


def candidates(snapshot: FleetSnapshot, places: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
    """As `reservations.reserve` takes them; what they have to compute by the index alone."""
    rows = np.empty(len(places), reservations.CANDIDATE)
    rows["slot"] = snapshot.slot[places]
    rows["generation"] = snapshot.generation[places]
    rows["new_prefill_tokens"] = (
        snapshot.new_prefill_tokens[places] + snapshot.in_flight_tokens[places]
    )
    return rows


def in_flight(
    snapshot: FleetSnapshot,
    places: npt.NDArray[np.intp],
    milestones: Milestones | None,
    *,
    checked: bool,
) -> InFlight | None:
    """What the reservation has to know of siblings; None where nobody has much to compute."""
    if milestones is None:
        return None
    new_tokens = snapshot.new_prefill_tokens[places]
    by_index_tokens = new_tokens + snapshot.in_flight_tokens[places]
    if by_index_tokens.max() < milestones.new_tokens_min:
        return None
    return InFlight(
        milestones=milestones,
        block_size_tokens=snapshot.block_size_tokens[places],
        expected_tokens=new_tokens if checked else None,
    )


def with_counters(
    snapshot: FleetSnapshot, places: npt.NDArray[np.intp], states: bytes
) -> FleetSnapshot:
    """The snapshot with the counters and siblings that the reservation saw."""
    if not states:
        return snapshot
    seen = np.frombuffer(states, reservations.CANDIDATE_STATE)
    queued, batch = snapshot.queued_prefill_tokens.copy(), snapshot.batch_size.copy()
    queued[places], batch[places] = seen["queued_prefill_tokens"], seen["batch_size"]
    hit, new = snapshot.hit_tokens.copy(), snapshot.new_prefill_tokens.copy()
    soon = snapshot.in_flight_tokens.copy()
    more_tokens = new[places] - seen["new_prefill_tokens"]
    new[places] -= more_tokens
    hit[places] += more_tokens
    soon[places] += more_tokens
    return replace(
        snapshot,
        queued_prefill_tokens=queued,
        batch_size=batch,
        hit_tokens=hit,
        in_flight_tokens=soon,
        new_prefill_tokens=new,
    )
