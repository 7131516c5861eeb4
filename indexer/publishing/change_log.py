"""Which blocks have changed in the last minutes, and when; pure."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from indexer.contract.identifiers import BlockHash

CHANGES_MAX: Final = 1 << 17
"""Changed hashes remembered: 100 seconds of an engine that changes a thousand blocks a second."""


class ChangeLog:
    """Bounded by the number of hashes, not by time, which is of one clock that never goes back."""

    def __init__(self, now_s: float) -> None:
        self._entries: deque[tuple[float, Sequence[BlockHash]]] = deque()
        self._hashes_count = 0
        self._complete_since_s = now_s

    def note(self, now_s: float, changed: Sequence[BlockHash]) -> None:
        """Blocks have changed by now; the sequence is kept, so nobody may alter it."""
        if not changed:
            return
        self._entries.append((now_s, changed))
        self._hashes_count += len(changed)
        while self._hashes_count > CHANGES_MAX:
            self._complete_since_s, dropped = self._entries.popleft()
            self._hashes_count -= len(dropped)

    def reaches(self, moment_s: float) -> bool:
        """Whether every change at that moment or later is remembered."""
        return moment_s > self._complete_since_s

    def latest(self) -> dict[BlockHash, float]:
        """When each block remembered has changed last."""
        return {block: noted_s for noted_s, blocks in self._entries for block in blocks}
