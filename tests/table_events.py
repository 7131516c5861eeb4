"""Events about one chain of blocks, and the hashes it has in the index."""

from collections.abc import Sequence
from typing import Any

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import BlockRemoved, BlockStored

TOKENS = list(range(100, 164))


def chain(tokens: Sequence[int] = TOKENS, size: int = 16) -> list[BlockHash]:
    """Canonical hashes as the router computes them."""
    root = block_hash.root(model_scope="m", block_size_tokens=size)
    return block_hash.split(block_hash.chain(root, block_hash.pack_tokens(tokens), size))


def store(
    hashes: Sequence[int], first: int = 0, parent: int | None = None, **more: Any
) -> BlockStored:
    """A store of blocks of 16 tokens of the chain, from number `first` on."""
    tokens = TOKENS[16 * first : 16 * (first + len(hashes))]
    return BlockStored(
        hashes=list(hashes),
        parent=parent,
        tokens=block_hash.pack_tokens(tokens),
        block_size_tokens=16,
        **more,
    )


def remove(*hashes: int, **more: Any) -> BlockRemoved:
    """A removal of these blocks."""
    return BlockRemoved(hashes=hashes, **more)
