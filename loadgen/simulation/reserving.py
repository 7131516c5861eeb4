"""A router's decision over shared books. Pure."""

from indexer.contract.limits import CANDIDATES_PER_RESERVE_MAX
from indexer.contract.milestones import Milestones
from loadgen.simulation.shared_books import MOVED, Key, SharedBooks
from router.candidates import candidates, in_flight, with_counters
from router.decide import decide, rank, shortlist
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
    """As `router.ledger.Ledger` asks Redis.

    By the product score the books choose, among candidates in lottery order. Any other policy names
    its choice and scores once more when the choice's counters have moved, or anybody's new prefill
    tokens because of a sibling; all at one moment, so nothing moves a second time.
    """
    product = isinstance(policy, LMetric)
    while True:
        if product:
            places = shortlist(policy, view, snapshot, CANDIDATES_PER_RESERVE_MAX)
        else:
            places = rank(policy(view, snapshot), view, snapshot, CANDIDATES_PER_RESERVE_MAX)
        rows = candidates(snapshot, places)
        status, index, states = books.reserve(
            key,
            rows,
            in_flight(snapshot, places, rows, milestones, checked=not product),
            now_s=now_s,
            choice=-1 if product else 0,
            expected_batch_size=-1 if product else int(snapshot.batch_size[places[0]]),
        )
        snapshot = with_counters(snapshot, places, states)
        if status != MOVED:
            assert index >= 0, "virtual instances do not leave"
            return decide(policy, view, snapshot, place=int(places[index]))
