"""How much of the index each instance may publish when memory is short; pure.

The index is bounded as a whole; what goes first is what routers have asked for longest ago. So the
instances are ordered by the time since their last reservation, in classes that double (a fleet in
use has all of its instances in the first one, and an order by the second would turn them around and
around): a class gives up everything before a warmer one gives up anything, and within a class all
give up the same share. Which chains of an instance go first its sidecar knows (`BlockTable.trim`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from indexer.contract.identifiers import SlotIndex

KEPT_RATIO: Final = 0.9
"""Of a limit: the rest is for what is published before a sidecar learns its budget."""

SERVER_FULL_RATIO: Final = 0.95
"""Of a server's maxmemory: at all of it stores are refused, or keys dropped."""

IDLE_CLASS_S: Final = 30.0
"""Instances reserved within this time count as equally warm."""

IDLE_CLASS_MAX: Final = 16
ROOM_RATIO: Final = 1 / 16
"""Of what an instance holds: how far it may grow until the next division without giving way."""

ROOM_SHARE: Final = 32
"""An empty instance may grow by this part of an equal share of the whole."""

BYTES_PER_MEMBERSHIP_ASSUMED: Final = 128.0
"""Of an index too small to be measured: well above what a (block, instance) takes in a full one."""

RELAX_S: Final = 30.0
"""Between two attempts to publish more on a server that was full."""

GIVE_WAY_MIN_S: Final = 0.1
GIVE_WAY_MAX_S: Final = 2.0
"""Between two times that an instance gives blocks up while its server stays full."""

FULL_AGAIN_S: Final = 5.0
"""A server that has refused nothing for so long is full anew, not still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One instance as the division sees it."""

    slot: SlotIndex
    blocks: int  # canonical blocks published, or withheld for want of room
    idle_s: float  # since routers last reserved it; infinite when never


def idle_class(idle_s: float) -> int:
    """0 up to IDLE_CLASS_S, then one more for each doubling."""
    if idle_s <= IDLE_CLASS_S:
        return 0
    doublings = math.log2(min(idle_s / IDLE_CLASS_S, 2.0**IDLE_CLASS_MAX))
    return min(1 + int(doublings), IDLE_CLASS_MAX)


def divide(claims: Sequence[Claim], blocks_max: int) -> dict[SlotIndex, int]:
    """Budgets in blocks, all together at most blocks_max.

    Each instance gets what it holds and some room to grow; what remains is divided equally. Where
    that is too much, the coldest class gets nothing, then the next warmer one; the last that gets
    anything is divided in proportion. The same claims always get the same budgets.
    """
    budgets = {claim.slot: 0 for claim in claims}
    left = max(blocks_max, 0)
    if not claims:
        return budgets
    base = left // (ROOM_SHARE * len(claims))
    by_class: dict[int, list[tuple[SlotIndex, int]]] = {}
    for claim in claims:
        wanted = claim.blocks + math.ceil(claim.blocks * ROOM_RATIO) + base
        by_class.setdefault(idle_class(claim.idle_s), []).append((claim.slot, wanted))
    for _, members in sorted(by_class.items()):
        wanted_all = sum(wanted for _, wanted in members)
        given = min(left, wanted_all)
        for slot, wanted in members:
            budgets[slot] = wanted * given // wanted_all if wanted_all else 0
        left -= given
    for slot in budgets:
        budgets[slot] += left // len(claims)
    return budgets


def blocks_within(limit_bytes: float, bytes_per_membership: float | None) -> int:
    """How many (block, instance) pairs may be published under a limit of the index."""
    per_membership = bytes_per_membership or BYTES_PER_MEMBERSHIP_ASSUMED
    return int(max(limit_bytes, 0.0) * KEPT_RATIO / per_membership)


def server_limit_bytes(*, index_bytes: float, used_bytes: int, maxmemory_bytes: int) -> float:
    """What the index may take of a server, everything else on it being as it is."""
    return maxmemory_bytes * SERVER_FULL_RATIO - (used_bytes - index_bytes)


def least(*divisions: dict[SlotIndex, int]) -> dict[SlotIndex, int]:
    """The smallest of several budgets of each instance."""
    slots: Iterable[SlotIndex] = {slot for division in divisions for slot in division}
    return {slot: min(d[slot] for d in divisions if slot in d) for slot in slots}


class Allowance:
    """How many blocks one instance may publish: its budget, and what its server has shown to take.

    Attributes:
        budget_blocks: as the fleet's division says; None for no limit.
    """

    def __init__(self) -> None:
        self.budget_blocks: int | None = None
        self._ceiling_blocks: int | None = None
        self._found_full_s = -math.inf
        self._relaxed_s = -math.inf
        self._pause_s = GIVE_WAY_MIN_S
        self._patient_until_s = -math.inf

    @property
    def blocks_max(self) -> int | None:
        """Canonical blocks that may be published; None for no limit."""
        bounds = [b for b in (self.budget_blocks, self._ceiling_blocks) if b is not None]
        return min(bounds, default=None)

    def found_full(self, published_blocks: int, now_s: float) -> bool:
        """The server has refused a store.

        Others give way as well, what one of them has freed shows only after a moment, and the cause
        may pass; so while the server stays full, blocks are given up at growing intervals.

        Args:
            published_blocks: to be published as things are.
            now_s: monotonic.

        Returns:
            Whether blocks have to give way now.
        """
        if now_s - self._found_full_s > FULL_AGAIN_S:
            self._pause_s, self._patient_until_s = GIVE_WAY_MIN_S, now_s
        self._found_full_s = now_s
        if now_s < self._patient_until_s:
            return False
        self._ceiling_blocks = max(published_blocks - 1, 0)
        self._patient_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, GIVE_WAY_MAX_S)
        return True

    def relax(self, wanted_blocks: int, now_s: float) -> None:
        """Allow a little more when the server has not been full for a while.

        Args:
            wanted_blocks: published and withheld; a ceiling above them is none.
            now_s: monotonic.
        """
        if self._ceiling_blocks is None:
            return
        if now_s - max(self._found_full_s, self._relaxed_s) < RELAX_S:
            return
        self._relaxed_s = now_s
        self._ceiling_blocks += self._ceiling_blocks // 16 + 16
        if self._ceiling_blocks > wanted_blocks:
            self._ceiling_blocks = None
