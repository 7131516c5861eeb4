"""Writes to the index of which some calls are refused: the index stays closed and becomes exact."""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer.contract.identifiers import BlockHash
from indexer.table.changes import Changes, Delta, PendingChanges

BLOCKS = 24
PAGE = 2
"""Blocks in one call; few, so that a write has many calls."""

FLUSH_MAX = 10


def block(n: int) -> BlockHash:
    """The n-th block; its parent is block n // 2, so that chains part everywhere."""
    return BlockHash(n.to_bytes(8, "big"))


def parent(of: BlockHash) -> BlockHash | None:
    """None for the first."""
    n = int.from_bytes(of, "big") // 2
    return block(n) if n else None


def pages(blocks: list[BlockHash]) -> Iterator[list[BlockHash]]:
    """Calls of a write."""
    for start in range(0, len(blocks), PAGE):
        yield blocks[start : start + PAGE]


class PartialWrites(RuleBasedStateMachine):
    """Blocks come and go, and are written by a sidecar whose server refuses calls as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: set[BlockHash] = set()
        self.index: set[BlockHash] = set()
        self.pending = PendingChanges()

    @rule(n=st.integers(1, BLOCKS))
    def add(self, n: int) -> None:
        """A block comes, and before it what is missing of its chain."""
        chain = [block(n >> shift) for shift in range(n.bit_length())]
        added = [own for own in reversed(chain) if own not in self.truth]
        self.truth.update(added)
        self.pending.merge(Delta(added=added))

    @rule(n=st.integers(1, BLOCKS))
    def remove(self, n: int) -> None:
        """A block goes, with all below it."""
        gone = [block(n)] if block(n) in self.truth else []
        for own in gone:
            gone += [child for child in sorted(self.truth) if parent(child) == own]
        self.truth.difference_update(gone)
        self.pending.merge(Delta(removed=gone[::-1]))

    @rule(data=st.data(), refuses=st.sampled_from(["nothing", "stores", "anything"]))
    def write(self, data: st.DataObject, refuses: str) -> None:
        """One flush: removals, then additions; a server out of memory refuses stores only."""
        changes = self.pending.take(FLUSH_MAX)
        if changes is None:
            return
        if data.draw(st.booleans()):  # more happens before the answers come
            self.remove(data.draw(st.integers(1, BLOCKS)))
            self.add(data.draw(st.integers(1, BLOCKS)))
        all_taken = True
        for blocks, is_store in ((changes.removed, False), (changes.added, True)):
            last: BlockHash | None = None
            for page in pages(blocks):
                refused = (
                    refuses == "anything" or (refuses == "stores" and is_store)
                ) and data.draw(st.booleans())
                in_order = last is None or (last in self.index) == is_store
                last = page[-1]
                if refused or not in_order:
                    all_taken = False
                elif is_store:
                    self.index.update(page)
                    self.is_closed()
                else:
                    self.index.difference_update(page)
                    self.is_closed()
        if not all_taken:
            self.pending.put_back(changes)

    @invariant()
    def is_closed(self) -> None:
        """No block without its parent: a lookup that bisects credits nothing across a hole."""
        assert {parent(own) for own in self.index} <= {None, *self.index}

    def teardown(self) -> None:
        """Once the server takes everything, the index is what it should be."""
        while (changes := self.pending.take(FLUSH_MAX)) is not None:
            self.index.difference_update(changes.removed)
            self.is_closed()
            self.index.update(changes.added)
            self.is_closed()
        assert self.truth == self.index


TestPartialWrites = PartialWrites.TestCase
TestPartialWrites.settings = settings(stateful_step_count=40)


def test_what_was_put_back_comes_first() -> None:
    """Its removals before later ones, its additions likewise; it has waited longest."""
    pending = PendingChanges()
    one, two, three = block(1), block(2), block(3)
    pending.merge(Delta(removed=[three]))
    pending.merge(Delta(added=[two]))
    pending.cover(8.0)
    pending.put_back(Changes(removed=[], added=[one], engine_ts_s=7.0, oldest_ts_s=6.0))
    expected = Changes(removed=[three], added=[one, two], engine_ts_s=8.0, oldest_ts_s=6.0)
    assert expected == pending.take(9)
