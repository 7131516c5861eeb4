"""One block of an engine's cache and its place in the tree of prefixes.

The block sizes of engine and fleet may differ: a block carries the canonical hashes that end within
it, and what is left behind the last of them. Siblings are a doubly linked list, so that any of many
can leave at once. A million blocks are kept, hence the slots and the absence of token ids.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Optional

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES

UNKNOWN: Final = BlockHash(b"")


class Rest(NamedTuple):
    """A stretch of a chain that is not a full canonical block."""

    last: BlockHash  # canonical hash before it; UNKNOWN while its block is not placed
    tokens: bytes
    extra_keys: tuple[object, ...]  # of every engine block it touches


class EngineBlock:
    """A block of one engine.

    Attributes:
        key: the engine's name of it.
        parent: the block before it in the prompt; None for the first.
        child: first of the blocks that follow it; the others are its `after` siblings.
        count: copies in the first deciding group.
        published_at: while it is published the table's `mark` when the engine last showed it, at
            least 1; else 0. It is published while it and all its ancestors are shown to be there.
        hashes: canonical hashes that end in it, concatenated; None while the block is not placed,
            because it or an ancestor was not announced yet.
        rest: of a placed block what is left behind its last canonical hash, None for nothing; else
            its own tokens, None when only its children were announced.
    """

    __slots__ = (
        "after",
        "before",
        "child",
        "count",
        "hashes",
        "key",
        "parent",
        "published_at",
        "rest",
    )

    def __init__(self, key: EngineBlockHash, parent: Optional["EngineBlock"]) -> None:
        self.key = key
        self.parent = parent
        self.child: EngineBlock | None = None
        self.before: EngineBlock | None = None
        self.after: EngineBlock | None = None
        self.count = 0
        self.published_at = 0
        self.hashes: bytes | None = None
        self.rest: Rest | None = None
        if parent is not None:
            sibling = parent.child
            parent.child = self
            if sibling is not None:
                self.after = sibling
                sibling.before = self

    def link(self, parent: "EngineBlock") -> None:
        """Become a child of a block."""
        self.parent, self.after = parent, parent.child
        if self.after is not None:
            self.after.before = self
        parent.child = self

    def adopt(self, parent: Optional["EngineBlock"]) -> bool:
        """Take the parent it was announced with; False when it is above that one itself."""
        ancestor = parent
        while ancestor is not None and ancestor.hashes is None:
            if ancestor is self:
                return False
            ancestor = ancestor.parent
        if parent is not None:
            self.link(parent)
        return True

    def unlink(self) -> None:
        """Leave parent and siblings."""
        if self.before is not None:
            self.before.after = self.after
        elif self.parent is not None:
            self.parent.child = self.after
        if self.after is not None:
            self.after.before = self.before

    def children(self) -> Iterator["EngineBlock"]:
        """The blocks that follow it."""
        block = self.child
        while block is not None:
            yield block
            block = block.after

    @property
    def is_expected(self) -> bool:
        """Whether only its children were announced so far."""
        return self.hashes is None and self.rest is None

    @property
    def is_unplaced(self) -> bool:
        """Whether it was announced, and waits for an ancestor that was not."""
        return self.rest is not None and self.rest.last == UNKNOWN

    def canonical(self) -> list[BlockHash]:
        """Canonical hashes that end in it; it is placed."""
        assert self.hashes is not None, self.key
        if len(self.hashes) == BLOCK_HASH_BYTES:
            return [BlockHash(self.hashes)]
        return block_hash.split(self.hashes)

    def last(self) -> BlockHash | None:
        """The canonical hash that ends exactly where it ends; None when none does."""
        if self.rest is not None or self.hashes is None:
            return None
        return BlockHash(self.hashes[-BLOCK_HASH_BYTES:])

    def behind(self) -> Rest:
        """Where the chain stands behind it; it is placed."""
        if self.rest is not None:
            return self.rest
        assert self.hashes, self.key
        return Rest(BlockHash(self.hashes[-BLOCK_HASH_BYTES:]), b"", ())

    def place(self, before: Rest, stride_bytes: int) -> None:
        """Compute its canonical hashes from where the chain stands before it.

        A canonical block takes the extra keys of every engine block that it touches.
        """
        own = self.rest
        assert own is not None, self.key
        last, tokens = before.last, before.tokens + own.tokens
        extra_keys = before.extra_keys + own.extra_keys
        hashes = []
        start = 0
        while len(tokens) - start >= stride_bytes:
            extra = block_hash.encode_extra_keys(extra_keys)
            last = block_hash.step(last, tokens[start : start + stride_bytes], extra)
            hashes.append(last)
            start += stride_bytes
            extra_keys = own.extra_keys
        self.hashes = b"".join(hashes)
        self.rest = Rest(last, tokens[start:], extra_keys) if start < len(tokens) else None
