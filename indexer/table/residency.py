"""Where an engine's blocks are: copies per medium and group, and which of them are set aside; pure.

A block may be resident and yet not be published, because it is *set aside*:

- *doubted*, after a loss of history: its count is only what is provable, one copy in each group
  where it had any. The engine proves it, group by group, by storing it or behind it.
- *withheld*, for want of room in the index: its counts are exact.

A doubted block may be *evident*: something outside of the event stream showed it to be there. Then
it is published, but still has to be proven, because a store that the evidence already knew of may
be on its way; counting that one on top would be one copy too many.
"""

from collections.abc import Collection
from typing import Final

from indexer.contract.identifiers import EngineBlockHash
from indexer.engine.vllm_events import DEVICE_MEDIUM, BlockRemoved, BlockStored
from indexer.table.engine_block import EngineBlock

ELSEWHERE_BLOCKS_MAX: Final = 1 << 20
"""Blocks on media that credit nothing; some emitters never announce their removal."""

PLACES_MAX: Final = 64
"""Pairs of medium and group; more are taken for foreign messages."""

GROUPS_MAX: Final = 16
"""Groups of one engine, deciding ones and others; more are taken for foreign messages."""

Copies = dict[EngineBlockHash, int]


class Residency:
    """Copies of every block of one engine, and why some are not published.

    Attributes:
        groups: groups that decide a hit, seen on the device. The first one counts in its blocks.
        partial_groups: groups on the device that are known to decide nothing.
        places: (medium, group) -> copies, for all but the first deciding group.
        doubted: blocks after a loss of history -> bit per deciding group that was not proven yet;
            known holes are among them, so that a block is doubted whenever one behind it is.
        evident: doubted blocks that are published nonetheless.
        withheld: blocks set aside for want of room, in that order.
    """

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.places: dict[tuple[str, int], Copies] = {}
        self.doubted: dict[EngineBlockHash, int] = {}
        self.evident: set[EngineBlockHash] = set()
        self.withheld: dict[EngineBlockHash, None] = {}
        self.partial_groups: set[int] = set()

    def clear(self) -> None:
        """The engine holds nothing any more; its groups stay known."""
        self.places.clear()
        self.doubted.clear()
        self.evident.clear()
        self.withheld.clear()

    # -- groups and copies ------------------------------------------------------------------------

    def begin_group(self, group: int) -> bool:
        """Take note of a further deciding group; False when there are too many."""
        if len(self.groups) >= GROUPS_MAX:
            return False
        self.groups.append(group)
        self.partial_groups.discard(group)
        return True

    def note_partial(self, group: int) -> None:
        """Take note of a group on the device whose holes end no hit."""
        if group not in self.groups and len(self.partial_groups) < GROUPS_MAX:
            self.partial_groups.add(group)

    def copies(self, group: int) -> Copies | None:
        """Copies of a deciding group; None for the first one, which counts in its blocks."""
        if group == self.groups[0]:
            return None
        return self.places.setdefault((DEVICE_MEDIUM, group), {})

    def store_elsewhere(self, event: BlockStored) -> int:
        """Count blocks on a medium that credits nothing; returns how many were refused."""
        place = event.medium, event.group
        copies = self.places.get(place)
        if copies is None:
            if len(self.places) >= PLACES_MAX:
                return len(event.hashes)
            copies = self.places[place] = {}
        room = ELSEWHERE_BLOCKS_MAX - sum(
            len(others) for (medium, _), others in self.places.items() if medium != DEVICE_MEDIUM
        )
        refused_count = 0
        for key in event.hashes:
            if key in copies:
                copies[key] += 1
            elif room > 0:
                copies[key] = 1
                room -= 1
            else:
                refused_count += 1
        return refused_count

    def remove_elsewhere(self, event: BlockRemoved) -> int:
        """Uncount blocks on a medium that credits nothing; returns how many were known."""
        copies = self.places.get((event.medium, event.group), {})
        known_count = 0
        for key in event.hashes:
            count = copies.get(key, 0)
            known_count += count > 0
            if count > 1:
                copies[key] = count - 1
            elif count == 1:
                del copies[key]
        return known_count

    def has_copies(self, block: EngineBlock) -> bool:
        """Whether the device holds it in any deciding group."""
        if block.count > 0 or len(self.groups) == 1:
            return block.count > 0
        return any(
            block.key in self.places.get((DEVICE_MEDIUM, group), ()) for group in self.groups[1:]
        )

    def is_shown(self, block: EngineBlock) -> bool:
        """Whether every deciding group holds it, and it is not set aside."""
        key = block.key
        if block.count == 0 or key in self.withheld:
            return False
        if key in self.doubted and key not in self.evident:
            return False
        return len(self.groups) == 1 or all(
            key in self.places.get((DEVICE_MEDIUM, group), ()) for group in self.groups[1:]
        )

    # -- set aside --------------------------------------------------------------------------------

    @property
    def has_set_aside(self) -> bool:
        """Whether any block is doubted or withheld."""
        return bool(self.doubted or self.withheld)

    @property
    def set_aside_count(self) -> int:
        """Blocks that are not published until they are confirmed."""
        return len(self.doubted) - len(self.evident) + len(self.withheld)

    def is_aside(self, key: EngineBlockHash) -> bool:
        """Whether a block is not to be published although it may be resident."""
        return key in self.withheld or (key in self.doubted and key not in self.evident)

    def is_doubted(self, key: EngineBlockHash, group: int) -> bool:
        """Whether the count of a block in a deciding group is only what was provable."""
        return bool(self.doubted.get(key, 0) & self._bit(group))

    def doubt(self, blocks: Collection[EngineBlock]) -> None:
        """Set all blocks aside, with one copy wherever they had any."""
        self.withheld.clear()
        self.evident.clear()
        every_group = (1 << len(self.groups)) - 1
        self.doubted = {block.key: every_group for block in blocks}
        for block in blocks:
            block.count = min(block.count, 1)
        self.places = {place: dict.fromkeys(copies, 1) for place, copies in self.places.items()}

    def prove(self, key: EngineBlockHash, group: int) -> bool:
        """The engine shows a block to be in a deciding group; False when that was certain."""
        doubts = self.doubted.get(key, 0)
        left = doubts & ~self._bit(group)
        if left:
            self.doubted[key] = left
        elif doubts:
            del self.doubted[key]
            self.evident.discard(key)
        if key in self.withheld:
            del self.withheld[key]
            return True
        return left != doubts

    def show(self, key: EngineBlockHash) -> None:
        """Something else shows a block that is set aside to be there."""
        self.withheld.pop(key, None)
        if key in self.doubted:
            self.evident.add(key)

    def forget(self, key: EngineBlockHash) -> None:
        """A block is dropped from the table."""
        self.doubted.pop(key, None)
        self.evident.discard(key)
        self.withheld.pop(key, None)

    def _bit(self, group: int) -> int:
        return 1 << self.groups.index(group)
