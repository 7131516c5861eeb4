"""The depths of a prompt at which requests in flight tell each other of common prefixes. Pure.

A request that is about to compute a prompt is known to its siblings by the hashes of a few of its
prefixes: four depths an octave, the same for every prompt, and the end. Two prompts that share a
prefix thus meet at no less than four fifths of it, and equal ones at their end.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final, Self

from indexer.contract.limits import (
    BLOCK_HASH_BYTES,
    BLOCKS_PER_LOOKUP_MAX,
    MILESTONES_MAX,
    SIBLING_BLOCKS_MIN,
)

PER_OCTAVE: Final = 4
_DEPTH_BYTES: Final = 4


def _common() -> tuple[int, ...]:
    """16, 20, 24, 28, 32, 40, ...: depths in blocks up to the longest chain."""
    depths = []
    octave = SIBLING_BLOCKS_MIN
    while octave <= BLOCKS_PER_LOOKUP_MAX:
        depths += [octave + octave * i // PER_OCTAVE for i in range(PER_OCTAVE)]
        octave *= 2
    return tuple(depth for depth in depths if depth <= BLOCKS_PER_LOOKUP_MAX)


_COMMON: Final = _common()
_PLACES: Final = tuple(
    slice((depth - 1) * BLOCK_HASH_BYTES, depth * BLOCK_HASH_BYTES) for depth in _COMMON
)
"""Where in a chain the blocks are that end there."""

assert SIBLING_BLOCKS_MIN % PER_OCTAVE == 0, "depths are whole blocks"
assert len(_COMMON) + 1 <= MILESTONES_MAX, "a chain has more milestones than a call takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """One prompt's milestones.

    Attributes:
        prompt_tokens: of the whole prompt.
        new_tokens_min: requests that compute fewer tokens are not announced to siblings.
        packed: shallow first, 12 bytes each: depth in tokens, block hash.
    """

    prompt_tokens: int
    new_tokens_min: int
    packed: bytes

    @classmethod
    def of(cls, hashes: bytes, *, prompt_tokens: int, block_size_tokens: int) -> Self | None:
        """Choose them from a chain.

        Args:
            hashes: chain of block hashes, from `block_hash.chain`.
            prompt_tokens: of the whole prompt.
            block_size_tokens: canonical block size of the fleet.

        Returns:
            None for a prompt too short to be worth it.
        """
        blocks = len(hashes) // BLOCK_HASH_BYTES
        if blocks < SIBLING_BLOCKS_MIN:
            return None
        end = blocks * BLOCK_HASH_BYTES
        common = zip(
            _packed_depths(block_size_tokens),
            map(hashes.__getitem__, _PLACES[: bisect_left(_COMMON, blocks)]),
            strict=False,
        )
        last = _packed_depth(blocks * block_size_tokens), hashes[end - BLOCK_HASH_BYTES : end]
        return cls(
            prompt_tokens=prompt_tokens,
            new_tokens_min=SIBLING_BLOCKS_MIN * block_size_tokens,
            packed=b"".join(chain(chain.from_iterable(common), last)),
        )


def _packed_depth(tokens: int) -> bytes:
    return tokens.to_bytes(_DEPTH_BYTES, "little")


@lru_cache(maxsize=64)
def _packed_depths(block_size_tokens: int) -> tuple[bytes, ...]:
    return tuple(_packed_depth(depth * block_size_tokens) for depth in _COMMON)
