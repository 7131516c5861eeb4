"""A router's decision over shared books. Pure."""

from indexer.contract.limits import CANDIDATES_PER_RESERVE_MAX
from indexer.contract.milestones import Milestones
from indexer.contract.request_classes import ClassPrefixes, RecentClasses
from loadgen.simulation.shared_books import MOVED, Key, SharedBooks
from router.candidates import candidates, in_flight, with_counters
from router.decide import decide, rank, shortlist
from router.detector import Detection, detect
from router.legs import WHOLE_FLEET
from router.policies.base import Policy
from router.policies.lmetric import LMetric
from router.snapshot import Decision, FleetSnapshot, RequestView


def detected(
    books: SharedBooks,
    hashes: bytes,
    snapshot: FleetSnapshot,
    *,
    now_s: float,
    pool: int = WHOLE_FLEET,
) -> Detection:
    """What a router that detects hot prefixes finds about a request.

    Its `candidates(snapshot)` are then those who may be chosen; `reserve_shared` takes both.

    Args:
        books: the fleet's.
        hashes: of the prompt's blocks, 8 bytes each; equal ones for equal prefixes.
        snapshot: who is eligible.
        now_s: when the index is asked.
        pool: that the request is for, see `legs.first_pool`.
    """
    prefixes = ClassPrefixes.of(hashes, pool)
    recent = RecentClasses.decode(books.classes.recent(prefixes, now_s))
    return detect(prefixes, recent, snapshot, pool=pool)


def reserve_shared(
    books: SharedBooks,
    policy: Policy,
    key: Key,
    view: RequestView,
    snapshot: FleetSnapshot,
    *,
    milestones: Milestones | None,
    now_s: float,
    detection: Detection | None = None,
) -> Decision:
    """As `router.ledger.Ledger` asks Redis.

    By the product score the books choose, among candidates in lottery order. Any other policy names
    its choice and scores once more when the choice's counters have moved, or anybody's new prefill
    tokens because of a sibling; all at one moment, so nothing moves a second time.

    With a detection, the snapshot is what its `candidates` left.
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
            prompt_tokens=view.prompt_tokens,
            classes=None if detection is None else detection.report(rows["slot"]),
        )
        snapshot = with_counters(snapshot, places, states)
        if status != MOVED:
            assert index >= 0, "virtual instances do not leave"
            hot_class = None if detection is None else detection.noted(snapshot)
            place = int(places[index])
            return decide(policy, view, snapshot, place=place, hot_class=hot_class)
