"""One request inside the engine: its tokens, block hashes and progress. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

TOKEN_BYTES = 4
TOKEN_TYPECODE = "I"

assert array(TOKEN_TYPECODE).itemsize == TOKEN_BYTES, "a token id is packed as u32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine is asked to do.

    Attributes:
        request_id: unique among the requests in the engine.
        packed_prompt: prompt token ids, u32 in native byte order; at least one.
        output_tokens: how many tokens to generate; at least one.
        seed: selects the pseudo answer; the same seed gives the same tokens.
        adapter: LoRA adapter name, None for the base model.
        adapter_id: its number, from 1.
        salt: cache salt; another salt is another cache.
        session_id: only passed on in events.
    """

    request_id: str
    packed_prompt: bytes
    output_tokens: int
    seed: int = 0
    adapter: str | None = None
    adapter_id: int | None = None
    salt: str | None = None
    session_id: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.packed_prompt) // TOKEN_BYTES


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 in native byte order.

    Raises:
        TypeError: an item is not an integer.
        OverflowError: an item is negative or does not fit 32 bits.
    """
    return array(TOKEN_TYPECODE, token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`."""
    return array(TOKEN_TYPECODE, packed).tolist()


def output_index(seed: int, position: int, choice_count: int) -> int:
    """Which of `choice_count` output tokens stands at `position` of the answer with this seed."""
    return xxhash.xxh3_64_intdigest(position.to_bytes(4, "little"), seed) % choice_count


class Sequence_:  # noqa: N801  # typing's Sequence keeps its name in this package
    """placeholder"""
