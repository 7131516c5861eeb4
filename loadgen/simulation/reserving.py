"""A router's decision over shared books. Pure."""

import numpy as np

from indexer.contract.limits import CANDIDATES_PER_RESERVE_MAX
from indexer.contract.milestones import Milestones
from loadgen.simulation.shared_books import Key, SharedBooks
from router.candidates import candidates, in_flight, with_counters
from router.decide import decide, lottery, rank
from router.policies.base import Policy
from router.policies.lmetric import LMetric
from router.snapshot import Decision, FleetSnapshot, RequestView


def reserve_shared(
    books: SharedBooks,
    policy: Policy,
    key: Key,
    view: RequestView,
    snapshot: FleetSnapshot,
    *,
    milestones: Milestones | None,
    now_s: float,
) -> Decision:
    """As `router.ledger.Ledger` asks Redis by the product score: candidates in lottery order."""
    assert isinstance(policy, LMetric), "the books take the least product"
    places = rank(policy(view, snapshot), view, snapshot, CANDIDATES_PER_RESERVE_MAX)
    places = places[np.argsort(lottery(view, snapshot)[places])]
    rows = candidates(snapshot, places)
    more = in_flight(snapshot, places, milestones, checked=False)
    index, states = books.reserve(key, rows, more, now_s=now_s)
    assert index is not None, "virtual instances do not leave"
    return decide(policy, view, with_counters(snapshot, places, states), place=int(places[index]))
