"""Block changes that wait to be published, net of each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from indexer.block_table import Delta
from indexer.contract.identifiers import BlockHash


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


class PendingChanges:
    """Deltas merged while an earlier write is under way; pure.

    A block added and removed meanwhile cancels out. Every delta keeps the published set
    prefix-closed at each of its steps; so does their merger, because removals stand in the order
    they came (a child left before its parent), additions likewise (a parent came before its child),
    and a block is never in both.
    """

    def __init__(self) -> None:
        self._removed: dict[BlockHash, None] = {}
        self._added: dict[BlockHash, None] = {}
        self._newest_ts_s: float | None = None
        self._oldest_ts_s: float | None = None

    def __len__(self) -> int:
        """Block changes that wait."""
        return len(self._removed) + len(self._added)

    def merge(self, delta: Delta) -> None:
        """Take another delta, which comes after everything merged so far."""
        for block in delta.removed:
            if block in self._added:
                del self._added[block]
            else:
                self._removed[block] = None
        for block in delta.added:
            if block in self._removed:
                del self._removed[block]
            else:
                self._added[block] = None

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
        self._added = dict.fromkeys(published)

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
        changes = Changes(
            removed=removed,
            added=added,
            engine_ts_s=None if self else self._newest_ts_s,
            oldest_ts_s=self._oldest_ts_s,
        )
        if not self:
            self._oldest_ts_s = None
        return changes
