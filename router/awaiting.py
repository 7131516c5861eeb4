"""Which block tells that a prompt's prefill has ended; pure."""

from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES


def last_full_block(
    hashes: bytes, *, prompt_tokens: int, block_size_tokens: int, engine_block_size_tokens: int
) -> BlockHash | None:
    """The last canonical block of a prompt that its engine stores whole; None when there is none.

    Of canonical and engine block one divides the other: an engine stores its own blocks, the index
    knows the canonical ones that are complete in them.

    Args:
        hashes: the prompt's chain of canonical block hashes, 8 bytes each.
        prompt_tokens: its length.
        block_size_tokens: canonical.
        engine_block_size_tokens: of the chosen engine.
    """
    known_tokens = len(hashes) // BLOCK_HASH_BYTES * block_size_tokens
    tokens = min(prompt_tokens, known_tokens)
    tokens -= tokens % max(block_size_tokens, engine_block_size_tokens)
    end = tokens // block_size_tokens * BLOCK_HASH_BYTES
    return BlockHash(hashes[end - BLOCK_HASH_BYTES : end]) if end else None
