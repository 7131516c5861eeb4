"""What tells that a request's prefill has ended; pure."""

from dataclasses import dataclass

import xxhash

from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES
from indexer.contract.reservations import NO_BLOCK
from router.snapshot import Booking, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEnd:
    """How the end of a request's prefill will be known, wherever it is sent.

    An engine takes the prompts of one request in their order, so the last block of the last prompt
    is stored last, unless it was there before. Of a prompt whose every token is computed again the
    blocks may well have been there before, and of unknown tokens nobody can name one: then the
    sidecar is asked to count.

    Attributes:
        request_id: of the request.
        first_byte_tells: it comes after the prefill: of a streamed answer to one prompt.
        hashes: chain of the prompt whose last full block tells, 8 bytes each; empty: none does.
        hashed_tokens: length of that prompt.
        prompt_tokens: of all prompts together.
        block_size_tokens: canonical.
    """

    request_id: str
    first_byte_tells: bool
    hashes: bytes
    hashed_tokens: int
    prompt_tokens: int
    block_size_tokens: int

    def awaited(self, decision: Decision, booking: Booking) -> BlockHash | None:
        """What the sidecar is to await; None: fewer tokens than a block, which are soon computed.

        Args:
            decision: names the engine.
            booking: of this attempt.
        """
        engine_block_size_tokens = decision.instance.block_size_tokens
        block = last_full_block(
            self.hashes,
            prompt_tokens=self.hashed_tokens,
            block_size_tokens=self.block_size_tokens,
            engine_block_size_tokens=engine_block_size_tokens,
        )
        if block is None and self.prompt_tokens >= max(
            self.block_size_tokens, engine_block_size_tokens
        ):
            return ticket(self.request_id, booking, decision)
        return block


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


def ticket(request_id: str, booking: Booking, decision: Decision) -> BlockHash:
    """Awaited like a block, but no block's hash: its sidecar finds it by counting.

    One for each booking, also of equal request ids.
    """
    named = f"{request_id} {booking.sequence} {decision.slot} {decision.booked_s}"
    digest = xxhash.xxh3_64_digest(named.encode())
    return BlockHash(digest if digest != NO_BLOCK else b"\x01" * BLOCK_HASH_BYTES)
