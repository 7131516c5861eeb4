"""Block changes that wait to be published, net of each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from indexer.contract.identifiers import BlockHash


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event changes in the index, net of what other blocks still hold.

    Attributes:
        removed: canonical hashes no longer held, children before parents; to be taken back first.
        added: canonical hashes held from now on, parents before children.
    """

    removed: Sequence[BlockHash] = ()
    added: Sequence[BlockHash] = ()


NOTHING: Final = Delta()
"""The index stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One write to the index.

    Attributes:
        removed: to be taken back first, children before parents.
        added: to be published then, parents before children.
        engine_ts_s: newest engine batch wholly published with this write; None when none is.
        oldest_ts_s: oldest engine batch that had to wait for it; None when unknown.
    """

    removed: list[BlockHash]
    added: list[BlockHash]
    engine_ts_s: float | None = None
    oldest_ts_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unseen:
    """Blocks that no reader of the index sees change, because it was over before it was written.

    The engine admits requests meanwhile, so these changes too make predictions come out otherwise.

    Attributes:
        came_back: claimed all the time, and not held for a while.
        came_and_went: never claimed, and held for a while.
    """

    came_back: Sequence[BlockHash] = ()
    came_and_went: Sequence[BlockHash] = ()


class PendingChanges:
    """Deltas merged while an earlier write is under way; pure.

    A block added and removed meanwhile cancels out. Every delta keeps the published set
    prefix-closed at each of its steps; so does their merger, because removals stand in the order
    they came (a child left before its parent), additions likewise (a parent came before its child),
    and a block is never in both.

    Nothing cancels out of a write that was put back: whether the index has its blocks is not known,
    so a block of it that goes is removed all the same, and one that comes back is added.
    """

    def __init__(self) -> None:
        self._removed: dict[BlockHash, None] = {}
        self._added: dict[BlockHash, None] = {}
        self._uncertain: set[BlockHash] = set()
        self._newest_ts_s: float | None = None
        self._oldest_ts_s: float | None = None

    def __len__(self) -> int:
        """Block changes that wait."""
        return len(self._removed) + len(self._added)

    @property
    def removed(self) -> frozenset[BlockHash]:
        """Blocks to be taken back."""
        return frozenset(self._removed)

    @property
    def oldest_ts_s(self) -> float | None:
        """Oldest engine batch of which something waits; None when there is none."""
        return self._oldest_ts_s if self else None

    def __contains__(self, block: object) -> bool:
        """Whether a change of this block waits."""
        return block in self._added or block in self._removed

    def merge(self, delta: Delta) -> Unseen:
        """Take another delta, which comes after everything merged so far; what it cancels out."""
        came_and_went = [block for block in delta.removed if block in self._added]
        for block in delta.removed:
            if block in self._added:
                del self._added[block]
                if block not in self._uncertain:
                    continue
            self._removed[block] = None
        came_back = [block for block in delta.added if block in self._removed]
        for block in delta.added:
            if block in self._removed:
                del self._removed[block]
                if block not in self._uncertain:
                    continue
            self._added[block] = None
        return Unseen(came_back, came_and_went)

    def cover(self, engine_ts_s: float) -> None:
        """Everything an engine batch changed has been merged."""
        if not self:
            self._oldest_ts_s = None
            return
        self._newest_ts_s = engine_ts_s
        if self._oldest_ts_s is None:
            self._oldest_ts_s = engine_ts_s

    def replace(self, published: Iterable[BlockHash]) -> None:
        """Start over from an empty index: publish exactly these, parents before children."""
        self._removed.clear()
        self._uncertain.clear()
        self._added = dict.fromkeys(published)

    def put_back(self, changes: Changes) -> Unseen:
        """Take a write back that was carried out in part or not at all; it is the oldest.

        Returns:
            What of it later changes cancel out.
        """
        later_removed, later_added = self._removed, self._added
        self._uncertain.update(changes.removed, changes.added)
        self._removed = dict.fromkeys(b for b in changes.removed if b not in later_added)
        self._removed.update(later_removed)
        self._added = dict.fromkeys(b for b in changes.added if b not in later_removed)
        self._added.update(later_added)
        if self._newest_ts_s is None or not (later_removed or later_added):
            self._newest_ts_s = changes.engine_ts_s
        if changes.oldest_ts_s is not None:
            self._oldest_ts_s = changes.oldest_ts_s
        return Unseen(
            came_back=[block for block in changes.removed if block in later_added],
            came_and_went=[block for block in changes.added if block in later_removed],
        )

    def take(self, blocks_max: int) -> Changes | None:
        """Take the next changes out, at most blocks_max of them; None when there are none."""
        if not self:
            return None
        removed = list(islice(self._removed, blocks_max))
        for block in removed:
            del self._removed[block]
        added = list(islice(self._added, blocks_max - len(removed)))
        for block in added:
            del self._added[block]
        if self._uncertain:
            self._uncertain.difference_update(removed, added)
        changes = Changes(
            removed=removed,
            added=added,
            engine_ts_s=None if self else self._newest_ts_s,
            oldest_ts_s=self._oldest_ts_s,
        )
        if not self:
            self._oldest_ts_s = None
        return changes
