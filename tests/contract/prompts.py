"""Prompts that share prefixes, as the server and as its twin take them."""

import struct

import numpy as np
import numpy.typing as npt
from contract.reference import Prompt

from indexer.contract import block_hash, reservations
from indexer.contract.limits import BLOCK_HASH_BYTES
from indexer.contract.milestones import Milestones

ENTRY = struct.Struct(f"<I{BLOCK_HASH_BYTES}s")
"""One milestone: depth in tokens, hash of the block that ends there."""


def candidates(*rows: tuple[int, int, int]) -> npt.NDArray[np.void]:
    """Rows of (slot, generation, new prefill tokens)."""
    return np.array(list(rows), reservations.CANDIDATE)


def depths_tokens(milestones: Milestones) -> list[int]:
    """Depth of each, in tokens."""
    return [depth for depth, _ in ENTRY.iter_unpack(milestones.packed)]


def tailed(shared_blocks: int, tail_blocks: int) -> tuple[Milestones, Prompt]:
    """A prompt of a common prefix and an own tail, for the server and for the twin."""
    token_ids = [*range(shared_blocks * 16), *([shared_blocks * 1000] * (tail_blocks * 16)), 7]
    root = block_hash.root(model_scope="m", block_size_tokens=16)
    hashes = block_hash.chain(root, block_hash.pack_tokens(token_ids), 16)
    milestones = Milestones.of(hashes, prompt_tokens=len(token_ids), block_size_tokens=16)
    assert milestones is not None
    chain = block_hash.split(hashes)
    return milestones, Prompt(
        tokens=len(token_ids),
        milestones={depth: chain[depth // 16 - 1] for depth in depths_tokens(milestones)},
        new_tokens_min=milestones.new_tokens_min,
    )
