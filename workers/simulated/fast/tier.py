"""The tier of the fast engines: `workers.simulated.tier` many blocks at a time. Pure."""

from collections import deque

import numpy as np

from workers.simulated.fast.block_columns import Identities
from workers.simulated.tier import TierConfig

_CHUNK_BLOCKS = 64  # looked at together at least: a numpy call costs as much as this many blocks
_ENTRIES_PER_BLOCK_MAX = 4  # of the queue, over the capacity, before stale ones are thrown out


class TierColumns:
    """`KvTier` by identity: the same laws, and the same order of what goes.

    A queue of segments, each a written chain, tail first, under its stamp. A block that is written
    again stays in its old segments, too, where its stamp tells that it is to be passed over.

    Attributes:
        config: its size and speed.
    """

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._stamps = np.zeros(0, np.int64)  # identity -> its last segment's; 0: not held
        self._segments: deque[tuple[int, Identities]] = deque()
        self._position = 0  # in the first segment
        self._entries = self._count = 0
        self._next_stamp = 1

    def __len__(self) -> int:
        """Blocks it holds."""
        return self._count

    def learn(self, identities_count: int) -> None:
        """Make room for identities below this; 8 bytes each."""
        if identities_count > len(self._stamps):
            grown = np.zeros(max(identities_count, 2 * len(self._stamps)), np.int64)
            grown[: len(self._stamps)] = self._stamps
            self._stamps = grown

    def match(self, identities: Identities) -> int:
        """How many leading ones of these blocks it holds; changes nothing. All are learnt."""
        if not len(identities):
            return 0
        stamps = self._stamps.take(identities)
        end = int(stamps.argmin())  # the first of the smallest: of the zeros, where there are some
        return len(identities) if stamps[end] else end

    def demote(self, identities: Identities) -> None:
        """Hold these blocks, evicted in this order, perhaps one twice; what is too much goes."""
        latest_first = identities[::-1]
        _, places = np.unique(latest_first, return_index=True)
        if len(places) < len(identities):  # its later eviction counts
            latest_first = latest_first[np.sort(places)]
        self.write(latest_first)

    def write(self, identities: Identities) -> None:
        """Hold this chain, from its first block on; what is too much is dropped. All are learnt."""
        if not len(identities):
            return
        stamp = self._next_stamp
        self._next_stamp = stamp + 1
        self._count += len(identities) - int(np.count_nonzero(self._stamps.take(identities)))
        self._stamps[identities] = stamp
        self._segments.append((stamp, identities[::-1]))
        self._entries += len(identities)
        if self._count > self.config.capacity_blocks:
            self._drop(self._count - self.config.capacity_blocks)
        if self._entries > _ENTRIES_PER_BLOCK_MAX * self.config.capacity_blocks:
            self._compact()

    def _drop(self, count: int) -> None:
        self._count -= count
        while count:
            stamp, chain = self._segments[0]
            part = chain[self._position : self._position + max(count, _CHUNK_BLOCKS)]
            places = (self._stamps.take(part) == stamp).nonzero()[0][:count]
            passed = int(places[-1]) + 1 if len(places) == count else len(part)
            self._stamps[part[places]] = 0
            count -= len(places)
            self._entries -= passed
            self._position += passed
            if self._position == len(chain):
                self._segments.popleft()
                self._position = 0

    def _compact(self) -> None:
        """Throw the old places of blocks that were written again out."""
        kept: deque[tuple[int, Identities]] = deque()
        for stamp, chain in self._segments:
            names = chain[self._position :]
            self._position = 0
            names = names[self._stamps.take(names) == stamp]
            if len(names):
                kept.append((stamp, names))
        self._segments = kept
        self._entries = sum(len(names) for _, names in kept)
        assert self._entries == self._count, (self._entries, self._count)
