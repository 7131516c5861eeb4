"""Prompts that share prefixes, as the server and as its twin take them."""

from contract.reference import Prompt

from indexer.contract import block_hash
from indexer.contract.milestones import Milestones


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
        milestones={depth: chain[depth // 16 - 1] for depth in milestones.depths_tokens()},
        new_tokens_min=milestones.new_tokens_min,
    )
