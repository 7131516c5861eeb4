"""The cache of an engine as its rules say, and nothing else: what is resident is plain to see.

As vLLM's block pool: physical blocks with reference counts, a free queue in order of release, in
which a request's blocks lie tail first, and eviction from its front; a block computed twice lies in
two physical blocks and is stored and removed twice. With several groups of layers each has a pool
of its own, and a hit is as long as the shortest of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

Path = tuple[int, ...]  # contents of a prompt's blocks, one after the other
Name = int  # what the engine calls a block: it follows from the salt and the path up to it


@cache
def name_of(salt: str | None, path: Path) -> Name:
    """The engine's own hash: sometimes negative, never ours."""
    return hash((salt, path, "engine"))


@cache
def chain_of(
    salt: str | None, path: Path, engine_tokens: int, fleet_tokens: int
) -> list[BlockHash]:
    """Canonical hashes of a prompt of these blocks, as a router computes them."""
    root = block_hash.root(model_scope="m", block_size_tokens=fleet_tokens, salt=salt)
    packed = b"".join(block_hash.pack_tokens([one] * engine_tokens) for one in path)
    return block_hash.split(block_hash.chain(root, packed, fleet_tokens))


@dataclass
class Pool:
    """Physical blocks of one group."""

    capacity: int
    content: dict[int, Name] = field(default_factory=dict)  # physical block -> what it holds
    cached: dict[Name, dict[int, None]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # physical block -> requests that hold it
    free: dict[int, None] = field(default_factory=dict)  # in order of eviction

    def __post_init__(self) -> None:
        self.free = dict.fromkeys(range(self.capacity))

    def touch(self, name: Name) -> int:
        """A request takes a cached block."""
        physical = next(iter(self.cached[name]))
        self.held[physical] = self.held.get(physical, 0) + 1
        self.free.pop(physical, None)
        return physical

    def allocate(self, name: Name) -> tuple[int, Name | None]:
        """A request takes a free block and fills it; returns what had to go for it."""
        physical = next(iter(self.free))
        del self.free[physical]
        evicted = self.content.pop(physical, None)
        if evicted is not None:
            del self.cached[evicted][physical]
            if not self.cached[evicted]:
                del self.cached[evicted]
        self.held[physical] = 1
        self.content[physical] = name
        self.cached.setdefault(name, {})[physical] = None
        return physical, evicted

    def release(self, physical: int) -> None:
        """A request lets a block go; it stays cached until it is needed."""
        self.held[physical] -= 1
        if not self.held[physical]:
            del self.held[physical]
            self.free[physical] = None


@dataclass
class Running:
    """A request under way, with its physical blocks in every pool."""

    salt: str | None
    path: Path
    tables: list[list[int]]


class ModelEngine:
    """One engine; every operation returns the events it sends, in one batch."""

    def __init__(self, *, block_tokens: int, capacities: Sequence[int]) -> None:
        self.block_tokens = block_tokens
        self.pools = [Pool(capacity) for capacity in capacities]
        self.running: list[Running] = []
        self._contents: dict[Name, tuple[str | None, Path]] = {}

    def hit_of(self, salt: str | None, path: Path) -> int:
        """Leading blocks that every pool has; the last block is computed anyway."""
        depth = 0
        while depth < len(path) - 1 and all(
            name_of(salt, path[: depth + 1]) in pool.cached for pool in self.pools
        ):
            depth += 1
        return depth

    def prefill(self, salt: str | None, path: Path, *, reads: bool = True) -> list[Event] | None:
        """A request begins; None when there is no room for it now.

        Args:
            salt: its cache salt.
            path: its blocks, all of them full.
            reads: whether it uses what is cached (one with prompt logprobs does not).
        """
        hit = self.hit_of(salt, path) if reads else 0
        tables = [
            [pool.touch(name_of(salt, path[: n + 1])) for n in range(hit)] for pool in self.pools
        ]
        request = Running(salt, path[:hit], tables)
        if any(len(pool.free) < len(path) - hit for pool in self.pools):
            self._release(request)
            return None
        self.running.append(request)
        return self._fill(request, path)

    def decode(self, number: int, content: int) -> list[Event] | None:
        """A running request fills one more block; None when there is no room."""
        request = self.running[number % len(self.running)]
        if any(not pool.free for pool in self.pools):
            return None
        return self._fill(request, (*request.path, content))

    def finish(self, number: int) -> None:
        """A request ends, or is preempted; that sends nothing."""
        self._release(self.running.pop(number % len(self.running)))

    def reset(self) -> list[Event]:
        """The prefix cache is dropped; only an idle engine does that."""
        assert not self.running
        self.pools = [Pool(pool.capacity) for pool in self.pools]
        return [AllBlocksCleared()]

    def resident(self, fleet_tokens: int) -> set[BlockHash]:
        """Canonical hashes of everything that could be hit."""
        names = set.intersection(*(set(pool.cached) for pool in self.pools))
        hashes: set[BlockHash] = set()
        for name in names:
            salt, path = self._contents[name]
            if all(name_of(salt, path[:n]) in names for n in range(1, len(path))):
                hashes.update(chain_of(salt, path, self.block_tokens, fleet_tokens))
        return hashes

    def _fill(self, request: Running, path: Path) -> list[Event]:
        """New blocks of a request, in every pool: what goes for them, then what is stored."""
        start = len(request.path)
        names = [name_of(request.salt, path[: n + 1]) for n in range(start, len(path))]
        self._contents |= {
            name: (request.salt, path[: start + n + 1]) for n, name in enumerate(names)
        }
        events: list[Event] = []
        for group, (pool, table) in enumerate(zip(self.pools, request.tables, strict=True)):
            for name in names:
                physical, evicted = pool.allocate(name)
                table.append(physical)
                if evicted is not None:
                    events.append(BlockRemoved(hashes=[evicted], group=group))
            tokens = [one for one in path[start:] for _ in range(self.block_tokens)]
            events.append(
                BlockStored(
                    hashes=names,
                    parent=name_of(request.salt, path[:start]) if start else None,
                    tokens=block_hash.pack_tokens(tokens),
                    block_size_tokens=self.block_tokens,
                    group=group,
                    salt=None if start else request.salt,
                )
            )
        request.path = path
        return events

    def _release(self, request: Running) -> None:
        for pool, table in zip(self.pools, request.tables, strict=True):
            for physical in reversed(table):
                pool.release(physical)
