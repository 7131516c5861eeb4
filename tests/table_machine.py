"""Whatever is lost, trimmed, restarted or credited: nothing is published that is not there.

A model engine lives, its events reach a table or are lost, what the table publishes goes through
pending changes into an index: the Python twin of the Redis functions, or a real server.
"""

from collections.abc import Sequence
from typing import Protocol

import msgpack
from contract.reference import ReferenceIndex
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_engine import ModelEngine, Path, chain_of

from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import Event
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta, PendingChanges

SIZES = [(16, 16), (16, 16), (32, 16), (64, 16), (128, 16), (16, 32), (16, 64)]
"""Tokens of an engine's block and of the fleet's."""

PATHS = st.sampled_from(
    [(0,), (0, 0), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (0, 1, 0), (1, 0)]
)
"""Few prompts, short ones: what can go wrong needs the same blocks again and again."""

SALTS = st.sampled_from([None] * 5 + ["s"])
ROAD = st.sampled_from(["at once"] * 4 + ["later", "lost"])
"""How a batch goes from the engine to the sidecar."""


class Index(Protocol):
    """Where sidecars publish, one after the other, each in a slot of its own."""

    def begin(self) -> None:
        """A sidecar takes a new slot."""

    def flush(self) -> None:
        """The server loses everything; the sidecar keeps its slot."""

    def write(self, removed: Sequence[BlockHash], added: Sequence[BlockHash]) -> None:
        """One write."""

    def depth(self, hashes: list[BlockHash]) -> int:
        """Leading blocks found for the sidecar's slot."""


class TwinIndex:
    """The Python twin of the Redis functions."""

    def __init__(self) -> None:
        self._twin = ReferenceIndex()
        self._slot = 0

    def begin(self) -> None:
        self._slot += 1

    def flush(self) -> None:
        self._twin = ReferenceIndex()

    def write(self, removed: Sequence[BlockHash], added: Sequence[BlockHash]) -> None:
        self._twin.remove(self._slot, list(removed))
        self._twin.store(self._slot, list(added))

    def depth(self, hashes: list[BlockHash]) -> int:
        return self._twin.depths(hashes, self._slot + 1)[self._slot]


class TableMachine(RuleBasedStateMachine):
    """One engine, one sidecar, one index."""

    def __init__(self, index: Index | None = None) -> None:
        super().__init__()
        self.index = index or TwinIndex()

    @initialize(
        sizes=st.sampled_from(SIZES),
        capacity=st.integers(2, 7),
        more=st.sampled_from([[], [], [2], [-2]]),
        loses=st.booleans(),
    )
    def begin(self, sizes: tuple[int, int], capacity: int, more: list[int], loses: bool) -> None:
        """An engine with one pool or two; in half of the runs no batch is lost."""
        self.engine_tokens, self.fleet_tokens = sizes
        self.capacities = [capacity, *(max(1, capacity + one) for one in more)]
        self.loses = loses
        self.chains: set[tuple[BlockHash, ...]] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.begin_engine()

    def begin_engine(self) -> None:
        """Another engine process: another instance, another table, another slot."""
        self.engine = ModelEngine(block_tokens=self.engine_tokens, capacities=self.capacities)
        self.table = BlockTable(model_scope="m", block_size_tokens=self.fleet_tokens)
        self.under_way: list[list[Event]] = []
        self.has_lost = False  # batches that were lost and not missed yet
        self.lost_ever = False
        self.observed: list[tuple[list[BlockHash], int]] = []
        self.published: set[BlockHash] = set()
        self.begin_slot()

    def begin_slot(self) -> None:
        """A slot is empty at first."""
        self.pending = PendingChanges()
        self.written: set[BlockHash] = set()
        self.index.begin()
        self.check_lookups()

    # -- the engine -------------------------------------------------------------------------------

    @rule(salt=SALTS, path=PATHS, reads=st.sampled_from([True] * 4 + [False]), road=ROAD)
    def prefill(self, salt: str | None, path: Path, reads: bool, road: str) -> None:
        """A request begins; how much of it was cached is seen, and told later or never."""
        chain = chain_of(salt, path, self.engine_tokens, self.fleet_tokens)
        self.chains.add(tuple(chain))
        self.parents |= dict(zip(chain, [None, *chain], strict=False))
        hit = self.engine.hit_of(salt, path)
        events = self.engine.prefill(salt, path, reads=reads)
        if events is None:
            return
        if reads and hit:
            hashes = chain_of(salt, path[:hit], self.engine_tokens, self.fleet_tokens)
            self.observed.append((hashes, self.table.mark))
        self.send(events, road)

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 9), content=st.integers(0, 1), road=ROAD)
    def decode(self, number: int, content: int, road: str) -> None:
        """A request fills a block."""
        request = self.engine.running[number % len(self.engine.running)]
        chain = chain_of(
            request.salt, (*request.path, content), self.engine_tokens, self.fleet_tokens
        )
        self.chains.add(tuple(chain))
        self.parents |= dict(zip(chain, [None, *chain], strict=False))
        events = self.engine.decode(number, content)
        if events is not None:
            self.send(events, road)

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        """A request ends."""
        self.engine.finish(number)

    @rule(ends=st.sampled_from(["finish"] * 6 + ["reset"] * 2 + ["restart"]), road=ROAD)
    def end_all(self, ends: str, road: str) -> None:
        """All requests end; then the prefix cache may be dropped, or the process end as well."""
        while self.engine.running:
            self.engine.finish(0)
        if ends == "reset":
            self.send(self.engine.reset(), road)
        elif ends == "restart":
            self.begin_engine()

    # -- from the engine to the table -------------------------------------------------------------

    def send(self, events: list[Event], road: str) -> None:
        """A batch leaves the engine."""
        if road == "lost" and self.loses:
            self.deliver()  # what is under way was sent before it
            self.has_lost = self.lost_ever = True
            return
        self.under_way.append(events)
        if road == "at once":
            self.deliver()

    @rule()
    def deliver(self) -> None:
        """The sidecar applies what is under way; only then it misses what was lost before."""
        for events in self.under_way:
            if self.has_lost:
                self.has_lost = False
                self.follow(self.table.doubt())
            for event in events:
                self.follow(self.table.apply(event))
        self.under_way = []

    @precondition(lambda self: self.observed)
    @rule(number=st.integers(0, 9))
    def notice(self, number: int) -> None:
        """What a request was seen to hit reaches the table."""
        hashes, since = self.observed.pop(number % len(self.observed))
        self.follow(self.table.credit(hashes, since=since))

    @rule(blocks_max=st.integers(0, 12))
    def trim(self, blocks_max: int) -> None:
        """The index is to be smaller."""
        self.follow(self.table.trim(blocks_max))
        assert self.table.published_count <= blocks_max

    @rule(blocks_max=st.integers(0, 100))
    def readmit(self, blocks_max: int) -> None:
        """There is room again."""
        count = self.table.published_count
        self.follow(self.table.readmit(blocks_max))
        assert self.table.published_count <= max(count, blocks_max)
        if blocks_max > 90:
            assert self.table.withheld_count == 0

    @rule()
    def restart_sidecar(self) -> None:
        """From its checkpoint; evidence that was addressed to the earlier one is gone."""
        dump = msgpack.unpackb(msgpack.packb(self.table.dump()), strict_map_key=False)
        counts = len(self.table), self.table.unplaced_count, self.table.set_aside_count
        self.follow(self.table.credit([]))
        self.table = BlockTable.load(dump, model_scope="m", block_size_tokens=self.fleet_tokens)
        assert counts == (
            len(self.table),
            self.table.unplaced_count,
            self.table.set_aside_count,
        )
        assert set(self.table.published()) <= self.published
        self.published = set(self.table.published())
        self.observed = []
        self.begin_slot()
        self.pending.replace(self.table.published())

    # -- from the table to the index --------------------------------------------------------------

    def follow(self, delta: Delta) -> None:
        """A delta keeps what is published closed at each of its steps."""
        for block in delta.removed:
            self.published.remove(block)
        for block in delta.added:
            assert block not in self.published
            self.published.add(block)
            parent = self.parents[block]
            assert parent is None or parent in self.published
        self.check_closed(self.published)
        self.pending.merge(delta)

    @rule(blocks_max=st.integers(1, 9), fate=st.sampled_from(["done"] * 4 + ["half", "unknown"]))
    def write(self, blocks_max: int, fate: str) -> None:
        """Some of what is pending is written; the answer may get lost, and half of the write."""
        changes = self.pending.take(blocks_max)
        if changes is None:
            return
        added = changes.added if fate != "half" else []
        self.index.write(changes.removed, added)
        self.written -= set(changes.removed)
        self.check_closed(self.written)
        self.written |= set(added)
        self.check_closed(self.written)
        if fate != "done":
            self.pending.put_back(changes)
        self.check_lookups()

    @rule()
    def flush(self) -> None:
        """The server loses everything, and the sidecar sees it."""
        self.index.flush()
        self.written = set()
        self.pending.replace(self.table.published())
        self.check_lookups()

    # -- laws -------------------------------------------------------------------------------------

    def check_closed(self, hashes: set[BlockHash]) -> None:
        """No block without the one before it."""
        for block in hashes:
            parent = self.parents[block]
            assert parent is None or parent in hashes

    def check_lookups(self) -> None:
        """The depth of a prompt is the number of its leading blocks in the index."""
        for chain in self.chains:
            hashes = list(chain)
            depth = next((n for n, h in enumerate(hashes) if h not in self.written), len(hashes))
            assert depth == self.index.depth(hashes)

    @property
    def is_current(self) -> bool:
        """Whether everything the engine has sent is applied, or known to be lost."""
        return not self.under_way and not self.has_lost

    @invariant()
    def the_table_is_what_its_deltas_say(self) -> None:
        """Listed once, parents first."""
        listed = self.table.published()
        assert self.published == set(listed)
        assert len(listed) == len(self.published) == self.table.published_count
        place = {block: n for n, block in enumerate(listed)}
        for block in listed:
            parent = self.parents[block]
            assert parent is None or place[parent] < place[block]

    @invariant()
    def nothing_is_published_that_is_not_there(self) -> None:
        """Exactly what is there, as long as nothing was lost and nothing is withheld."""
        if self.is_current:
            resident = self.engine.resident(self.fleet_tokens)
            assert self.published <= resident
            if not self.lost_ever and self.table.withheld_count == 0:
                assert self.published == resident

    @invariant()
    def what_is_written_is_what_is_published(self) -> None:
        """As soon as nothing is pending."""
        if not self.pending:
            assert self.written == self.published
