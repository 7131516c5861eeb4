"""The block table against the meaning of the events, computed from scratch after every step."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta, PendingChanges

Place = tuple[str, int]  # medium, group


class Reference:
    """What the events mean: multisets of residents, and the content of every block announced."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.copies: Counter[tuple[EngineBlockHash, Place]] = Counter()
        self.content: dict[EngineBlockHash, tuple[BlockStored, int]] = {}
        self.groups: list[int] = []

    def apply(self, event: Event) -> None:
        """Take an event."""
        match event:
            case BlockStored():
                if event.medium == "GPU" and event.decides and event.group not in self.groups:
                    self.groups.append(event.group)
                for i, key in enumerate(event.hashes):
                    self.copies[key, (event.medium, event.group)] += 1
                    if event.medium == "GPU" and event.decides:
                        self.content.setdefault(key, (event, i))
            case BlockRemoved():
                for key in event.hashes:
                    if self.copies[key, (event.medium, event.group)]:
                        self.copies[key, (event.medium, event.group)] -= 1
            case AllBlocksCleared():
                self.copies.clear()

    def is_resident(self, key: EngineBlockHash) -> bool:
        """In every deciding group."""
        return bool(self.groups) and all(self.copies[key, ("GPU", group)] for group in self.groups)

    def ancestry(self, key: EngineBlockHash) -> list[EngineBlockHash] | None:
        """The block and all before it, first one first; None when one was never announced."""
        path: list[EngineBlockHash] = []
        current: EngineBlockHash | None = key
        while current is not None:
            if current not in self.content:
                return None
            path.insert(0, current)
            event, i = self.content[current]
            current = event.hashes[i - 1] if i else event.parent
        return path

    def published(self) -> set[BlockHash]:
        """Canonical hashes of every block that is resident with all its ancestors."""
        hashes: set[BlockHash] = set()
        for key in self.content:
            path = self.ancestry(key)
            if path is not None and all(self.is_resident(block) for block in path):
                hashes.update(self.chain(path))
        return hashes

    def chain(self, path: Sequence[EngineBlockHash]) -> list[BlockHash]:
        """Canonical hashes of the prompt that consists of these blocks."""
        tokens = b""
        for key in path:
            event, i = self.content[key]
            size = 4 * event.block_size_tokens
            tokens += event.tokens[i * size : (i + 1) * size]
        first, _ = self.content[path[0]]
        root = block_hash.root(
            model_scope="m",
            block_size_tokens=self.block_size_tokens,
            adapter=first.adapter,
            salt=first.salt,
        )
        return block_hash.split(block_hash.chain(root, tokens, self.block_size_tokens))


class Prompts:
    """Prompts that share prefixes, in engine blocks whose names follow from the whole prefix."""

    def __init__(self, engine_tokens: int, adapter: str | None, seed: int) -> None:
        self.engine_tokens = engine_tokens
        self.adapter = adapter
        self.seed = seed

    def name(self, path: tuple[int, ...]) -> int:
        """The engine's own hash of a prefix: sometimes negative, never ours."""
        return hash((self.seed, path))

    def tokens(self, choice: int) -> list[int]:
        """Tokens of one block; two blocks of a choice are one block of twice the size."""
        return [choice] * self.engine_tokens

    def stored(self, path: tuple[int, ...], start: int, medium: str, group: int) -> BlockStored:
        """The blocks of a prompt from `start` on, in one event."""
        tokens = [token for choice in path[start:] for token in self.tokens(choice)]
        names = [self.name(path[: n + 1]) for n in range(start, len(path))]
        return BlockStored(
            hashes=names,
            parent=self.name(path[:start]) if start else None,
            tokens=block_hash.pack_tokens(tokens),
            block_size_tokens=self.engine_tokens,
            adapter=self.adapter,
            medium=medium,
            group=group,
        )


PATHS = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=6).map(tuple)
MEDIA = st.sampled_from(["GPU"] * 6 + ["CPU"])
GROUPS = st.integers(0, 1)
SIZES = st.sampled_from([8, 16, 32, 64])
KINDS = st.sampled_from([0, 0, 2, 2, 1])


class BlockTableMachine(RuleBasedStateMachine):
    """Any event stream: duplicates, holes, unknown parents, clears, groups, media, block sizes."""

    @initialize(
        fleet_tokens=st.sampled_from([16, 32, 64]),
        engine_tokens=SIZES,
        other_tokens=SIZES,
        groups_count=st.sampled_from([1, 1, 2]),
    )
    def begin(
        self, fleet_tokens: int, engine_tokens: int, other_tokens: int, groups_count: int
    ) -> None:
        """A fleet, and an engine that has other names, and perhaps sizes, for some equal blocks."""
        self.table = BlockTable(model_scope="m", block_size_tokens=fleet_tokens)
        self.reference = Reference(fleet_tokens)
        self.prompts = [
            Prompts(engine_tokens, None, 0),
            Prompts(engine_tokens, "ada", 1),
            Prompts(other_tokens, None, 2),
        ]
        self.groups_count = groups_count
        self.index: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.pending = PendingChanges()
        self.written: dict[BlockHash, None] = {}

    @rule(
        path=PATHS,
        start=st.sampled_from([0, 0, 0, 1, 2, 4]),
        kind=KINDS,
        medium=MEDIA,
        group=GROUPS,
    )
    def store(self, path: tuple[int, ...], start: int, kind: int, medium: str, group: int) -> None:
        """Blocks of a prompt from somewhere on; what is before may be unknown or a hole."""
        start = min(start, len(path) - 1)
        self.apply(self.prompts[kind].stored(path, start, medium, group % self.groups_count))

    @rule(
        paths=st.lists(PATHS, min_size=1, max_size=4),
        kind=KINDS,
        medium=MEDIA,
        group=GROUPS,
    )
    def remove(self, paths: list[tuple[int, ...]], kind: int, medium: str, group: int) -> None:
        """Blocks anywhere, also such as were never stored."""
        names = [self.prompts[kind].name(path) for path in paths]
        group %= self.groups_count
        self.apply(BlockRemoved(hashes=names, medium=medium, group=group))

    @rule(chance=st.integers(1, 6))
    def clear(self, chance: int) -> None:
        """The engine drops everything (now and then)."""
        if chance == 1:
            self.apply(AllBlocksCleared())

    @rule(blocks_max=st.integers(1, 5))
    def write(self, blocks_max: int) -> None:
        """A write to Redis takes some of what is pending; the index stays closed at every step."""
        changes = self.pending.take(blocks_max)
        if changes is None:
            return
        for block in changes.removed:
            del self.written[block]
            self.check_closed(set(self.written))
        for block in changes.added:
            assert block not in self.written
            self.written[block] = None
            self.check_closed(set(self.written))

    def apply(self, event: Event) -> None:
        """Apply to table and reference; the delta must keep the index closed at every step."""
        self.reference.apply(event)
        self.learn_parents()
        delta: Delta = self.table.apply(event)
        self.pending.merge(delta)
        for block in delta.removed:
            self.index.remove(block)
            self.check_closed(self.index)
        for block in delta.added:
            assert block not in self.index
            self.index.add(block)
            self.check_closed(self.index)

    def learn_parents(self) -> None:
        """Which canonical block stands before which."""
        for key in self.reference.content:
            path = self.reference.ancestry(key)
            if path is not None:
                chain = self.reference.chain(path)
                self.parents |= dict(zip(chain, [None, *chain], strict=False))

    def check_closed(self, index: set[BlockHash]) -> None:
        """No block without the one before it."""
        for block in index:
            parent = self.parents[block]
            assert parent is None or parent in index

    @invariant()
    def agrees(self) -> None:
        """The table publishes what the events mean, and lists it parents first."""
        if not hasattr(self, "table"):
            return
        assert self.reference.published() == self.index
        listed = self.table.published()
        assert self.index == set(listed)
        assert len(listed) == len(self.index) == self.table.published_count
        for n, block in enumerate(listed):
            assert self.parents[block] is None or self.parents[block] in listed[:n]

    def teardown(self) -> None:
        """When every copy is removed nothing is published and nothing is kept."""
        if not hasattr(self, "table"):
            return
        for (key, (medium, group)), count in list(self.reference.copies.items()):
            for _ in range(count):
                self.apply(BlockRemoved(hashes=[key], medium=medium, group=group))
        assert set() == self.index
        assert (len(self.table), self.table.published_count, self.table.unplaced_count) == (0, 0, 0)
        while self.pending:
            self.write(3)
        assert self.written == {}


BlockTableMachine.TestCase.settings = settings(stateful_step_count=20)
TestBlockTable = BlockTableMachine.TestCase
