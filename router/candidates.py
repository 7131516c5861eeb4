"""Snapshot to reservation arguments, and the reservation's answer to snapshot. Pure."""

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.contract import reservations
from indexer.contract.milestones import Milestones
from indexer.contract.reservations import InFlight
from router.snapshot import FleetSnapshot

_STATE_COLUMNS: Final = 3
assert reservations.CANDIDATE_STATE.names == (
    *("queued_prefill_tokens", "batch_size", "new_prefill_tokens"),
), "with_counters reads them as rows of whole numbers"


def candidates(snapshot: FleetSnapshot, places: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
    """As `reservations.reserve` takes them; what they have to compute by the index alone."""
    by_index_tokens = snapshot.new_prefill_tokens + snapshot.in_flight_tokens
    columns = np.array((snapshot.slot, snapshot.generation, by_index_tokens))[:, places]
    rows = np.empty(len(places), reservations.CANDIDATE)
    rows["slot"], rows["generation"], rows["new_prefill_tokens"] = columns
    return rows


def in_flight(
    snapshot: FleetSnapshot,
    places: npt.NDArray[np.intp],
    rows: npt.NDArray[np.void],
    milestones: Milestones | None,
    *,
    checked: bool,
) -> InFlight | None:
    """What the reservation has to know of siblings; None where nobody has much to compute.

    Args:
        snapshot: what is known of the fleet.
        places: of the candidates.
        rows: the candidates, from `candidates`.
        milestones: of the prompt; None: siblings are not counted.
        checked: what the candidates have to compute, siblings counted, must not have changed.
    """
    if milestones is None or rows["new_prefill_tokens"].max() < milestones.new_tokens_min:
        return None
    return InFlight(
        milestones=milestones,
        block_size_tokens=snapshot.block_size_tokens[places],
        expected_tokens=snapshot.new_prefill_tokens[places] if checked else None,
    )


def with_counters(
    snapshot: FleetSnapshot, places: npt.NDArray[np.intp], states: bytes
) -> FleetSnapshot:
    """The snapshot with the counters and siblings that the reservation saw."""
    if not states:
        return snapshot
    columns = np.array(
        (snapshot.queued_prefill_tokens, snapshot.batch_size, snapshot.new_prefill_tokens)
    )
    columns[:, places] = np.frombuffer(states, np.uint32).reshape(-1, _STATE_COLUMNS).T
    queued, batch, new = columns
    more_tokens = snapshot.new_prefill_tokens - new
    return replace(
        snapshot,
        queued_prefill_tokens=queued,
        batch_size=batch,
        hit_tokens=snapshot.hit_tokens + more_tokens,
        in_flight_tokens=snapshot.in_flight_tokens + more_tokens,
        new_prefill_tokens=new,
    )
