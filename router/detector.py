"""Pure: when a prefix is hotter than its holders can bear, and who is a candidate then.

Multiplication can fail where requests of one class, those that share a prefix, are a share x of
all, and the instances M that hold the prefix keep winning them although M' others are idle. That is
possible only if x / (1 - x) > M / M' (LMetric, arXiv 2603.15202, "when multiplication can fail").

- Class: the deepest prefix of 1, 2, 4, 8, ... blocks whose share of the requests that all routers
  booked in the last CLASS_WINDOW_S (30 s of Redis time; the window before counts as far as it
  reaches into them) passes a floor: 1 / instances, since a rarer class is no trouble even to a
  single holder, and SHARE_LEAST. With fewer than REQUESTS_PER_INSTANCE_LEAST requests for each
  instance in the window nothing is judged.
- Pool: where prefill and decode are apart, all of this is a pool's own: its requests, its
  instances, its holders, its states (`legs.first_pool`). Whoever cannot be asked neither holds nor
  spares anything, and what holds in one pool must not end what is going on in another. The pool is
  named before Redis is asked, by the roles as last known. Where those who are eligible then are
  another pool, because all who prefill drain or have gone, or one instance alone can answer, the
  request is counted and nothing is judged: neither alarm nor end.
- Alarm: the condition holds; neither M nor M' is empty. A holder is who has the whole prefix, or is
  about to compute it.
- Taken out: after 2 x M requests of the class in a row that went to holders all the same, by
  whatever policy. The state is in Redis (`classes_v1.lua`), so routers agree.
- Readmitted: with the first request of the class for which the condition does not hold, be it that
  others hold the prefix by now or that it has become rarer; or when none has come for a window.

While M is taken out, each request of the class goes to somebody who does not hold the prefix, and
makes a holder of him, at once where requests in prefill are credited: so it is over after hardly
more requests than x times the instances. Whoever is the last one left is never taken out, and a
retry has all candidates again.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.contract.request_classes import (
    ClassPrefixes,
    ClassReport,
    RecentClasses,
    Saying,
    Standing,
    Verdict,
)
from router.eligibility import take
from router.snapshot import FleetSnapshot, HotClass

SHARE_LEAST: Final = 0.02
"""Rarer classes are not told from chance, nor from prefixes that are counted at one place."""

REQUESTS_PER_INSTANCE_LEAST: Final = 4
STREAK_PER_HOLDER: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What was found about one request.

    Attributes:
        prefixes: of its prompt.
        hot_class: of it; None: it is of no class.
        standing: of that class in Redis when the router looked.
    """

    prefixes: ClassPrefixes
    hot_class: HotClass | None = None
    standing: Standing = Standing.QUIET

    def candidates(self, snapshot: FleetSnapshot) -> FleetSnapshot:
        """Those of the snapshot who may be chosen; never nobody."""
        if self.hot_class is None or not self.hot_class.taken_out:
            return snapshot
        others = (~self._are_holders(snapshot.slot)).nonzero()[0]
        return take(snapshot, others) if 0 < others.size < len(snapshot.slot) else snapshot

    def report(self, slots: npt.NDArray[np.integer]) -> ClassReport:
        """What the reservation tells.

        Args:
            slots: of its candidates, in their order.
        """
        hot, says = self.hot_class, self._says()
        if hot is None or says is None:
            return ClassReport(prefixes=self.prefixes)
        return ClassReport(
            prefixes=self.prefixes,
            verdict=Verdict(
                name=hot.prefix,
                says=says,
                streak_least=STREAK_PER_HOLDER * len(hot.holders),
                depth_blocks=hot.depth_blocks,
                share=hot.share,
                holders=len(hot.holders),
            ),
            holder_flags=self._are_holders(slots).astype(np.uint8).tobytes(),
        )

    def noted(self, snapshot: FleetSnapshot) -> HotClass | None:
        """The class as it took part in a decision among the instances of this snapshot."""
        hot = self.hot_class
        if hot is None or not hot.taken_out:
            return hot
        return replace(hot, taken_out=not self._are_holders(snapshot.slot).any())

    def _are_holders(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        holders = frozenset(() if self.hot_class is None else self.hot_class.holders)
        return np.array([slot in holders for slot in slots.tolist()], np.bool_)

    def _says(self) -> Saying | None:
        if self.hot_class is None or not self.hot_class.alarm:
            return Saying.OVER if self.standing != Standing.QUIET else None
        return Saying.STEERED if self.hot_class.taken_out else Saying.WATCHED


def detect(
    prefixes: ClassPrefixes,
    recent: RecentClasses | None,
    snapshot: FleetSnapshot,
    *,
    pool: int | None,
) -> Detection:
    """Find the class of a request, and whether it is in trouble.

    Args:
        prefixes: of its prompt.
        recent: what Redis said of them; None: it did not say, and nothing is judged.
        snapshot: who is eligible.
        pool: of which number they are, see `legs.first_pool`; None: of none, as one instance that
            alone can answer. Nothing is judged unless the prefixes are of the same.
    """
    recent = None if recent is None or pool != prefixes.pool else recent.within(prefixes)
    level = None if recent is None else _class_level(recent, len(snapshot.slot))
    if recent is None or level is None:
        return Detection(prefixes=prefixes)
    depth_blocks = 1 << level
    share = min(1.0, float(recent.counts[: level + 1].min()) / recent.requests)
    held = snapshot.depth_tokens >= depth_blocks * snapshot.fleet.block_size_tokens
    holders = tuple(snapshot.slot[held].tolist())
    others_count = len(held) - len(holders)
    alarm = 0 < len(holders) < len(held) and share * others_count > (1 - share) * len(holders)
    standing = Standing(int(recent.standings[level]))
    return Detection(
        prefixes=prefixes,
        hot_class=HotClass(
            prefix=prefixes.name(prefixes.shallowest + level),
            depth_blocks=depth_blocks,
            share=share,
            holders=holders,
            alarm=alarm,
            taken_out=alarm and standing == Standing.TAKEN_OUT,
        ),
        standing=standing,
    )


def _class_level(recent: RecentClasses, instances_count: int) -> int | None:
    """Of the deepest prefix that is frequent enough; None when none is, or little was seen."""
    if recent.requests < REQUESTS_PER_INSTANCE_LEAST * instances_count:
        return None
    floor = max(1 / instances_count, SHARE_LEAST) * recent.requests
    # A prefix is no more frequent than what it begins with: so the shallow ones bound what a
    # deep one has been counted too high.
    counts = np.minimum(recent.counts, recent.requests)
    frequent = np.minimum.accumulate(counts) > floor
    return int(frequent.sum()) - 1 if frequent.any() else None
