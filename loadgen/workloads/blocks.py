"""Pure: block ids for traces that have none, and for prompts made of known pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Required, TypedDict

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from loadgen.workloads.options import ReadOptions


@dataclass(slots=True)
class FreshIds:
    """Hands out ids that were never used before."""

    used_count: int = 0

    def take(self, count: int) -> range:
        """The next `count` ids."""
        first = self.used_count
        self.used_count += count
        return range(first, self.used_count)


@dataclass(slots=True)
class PromptBlocks:
    """Block ids of prompts of which only the length is known; see `PromptMaking`.

    Raises ValueError where no way of making prompts is chosen.
    """

    options: ReadOptions
    _ids: FreshIds = field(default_factory=FreshIds)
    _shared: dict[int, list[int]] = field(default_factory=dict)
    _generator: np.random.Generator = field(init=False)
    _popularity: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng([self.options.seed, 11])
        self._popularity = np.cumsum(zipf(self.options.reuse_groups_count, 1.0))

    def blocks(self, prompt_tokens: int, *, group: int | None = None) -> tuple[int, ...]:
        """Ids of a new prompt; `group` None draws one by popularity."""
        options = self.options
        if options.prompts is None:
            raise ValueError(
                "the trace does not say which prompts share what: choose --prompts unique (nothing "
                "is shared) or --prompts reuse (the leading --reuse_ratio of each prompt is)"
            )
        blocks_count = -(-prompt_tokens // options.block_size_tokens)
        if options.prompts == "unique":
            return tuple(self._ids.take(blocks_count))
        if group is None:
            group = int(np.searchsorted(self._popularity, self._generator.random()))
        shared_count = int(options.reuse_ratio * prompt_tokens) // options.block_size_tokens
        shared = self._shared.setdefault(group, [])
        shared.extend(self._ids.take(max(0, shared_count - len(shared))))
        return (*shared[:shared_count], *self._ids.take(blocks_count - shared_count))


def text_tokens(text: str, chars_per_token: float) -> int:
    """Estimated length of a text in tokens, at least 1."""
    return max(1, int(np.ceil(len(text) / chars_per_token)))


def text_blocks(text: str, *, chars_per_token: float, block_size_tokens: int) -> tuple[int, ...]:
    """Ids of the blocks of a text: equal ids stand for equal text up to and with the block."""
    count = -(-text_tokens(text, chars_per_token) // block_size_tokens)
    edges = [int(block * block_size_tokens * chars_per_token) for block in range(count)]
    parts = [
        text[start:end].encode("utf-8", "surrogatepass")
        for start, end in zip(edges, [*edges[1:], len(text)], strict=True)
    ]
    return _chain(parts)


class PromptFields(TypedDict, total=False):
    """The fields of a `TraceRow` that make its prompt."""

    prompt_tokens: Required[int]
    text: str
    block_ids: tuple[int, ...]
    block_size_tokens: int


def prompt_of_text(text: str, options: ReadOptions) -> PromptFields:
    """A prompt of known text in the form that the options ask for."""
    prompt_tokens = text_tokens(text, options.chars_per_token)
    if options.text_as == "text":
        return {"prompt_tokens": prompt_tokens, "text": text}
    return {
        "prompt_tokens": prompt_tokens,
        "block_size_tokens": options.block_size_tokens,
        "block_ids": text_blocks(
            text,
            chars_per_token=options.chars_per_token,
            block_size_tokens=options.block_size_tokens,
        ),
    }


def piece_blocks(pieces: Sequence[tuple[int, int]], block_size_tokens: int) -> tuple[int, ...]:
    """Ids of the blocks of a prompt that is a row of pieces.

    Args:
        pieces: (id of the piece, its length in tokens); equal ids are equal tokens.
        block_size_tokens: tokens per block; blocks do not care where pieces end.
    """
    parts: list[bytes] = []
    part = b""
    room = block_size_tokens
    for piece, length in pieces:
        offset = 0
        while offset < length:
            taken = min(room, length - offset)
            part += b"%d:%d+%d;" % (piece, offset, taken)
            offset += taken
            room -= taken
            if room == 0:
                parts.append(part)
                part, room = b"", block_size_tokens
    if part:
        parts.append(part)
    return _chain(parts)


def zipf(count: int, exponent: float) -> npt.NDArray[np.float64]:
    """Probabilities of ranks 1 .. count, proportional to rank^-exponent; they add up to 1."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def _chain(parts: Sequence[bytes]) -> tuple[int, ...]:
    """63-bit digests, each over its part and the digest before."""
    ids: list[int] = []
    digest = 0
    for part in parts:
        digest = xxh3_64_intdigest(digest.to_bytes(8, "little") + part) >> 1
        ids.append(digest)
    return tuple(ids)
