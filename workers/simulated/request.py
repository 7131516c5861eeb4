"""One request inside the engine: its tokens, block hashes and progress. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from workers.simulated.eviction.base import Category

TOKEN_BYTES = 4
TOKEN_TYPECODE = "I"  # noqa: S105  # an array type code

assert array(TOKEN_TYPECODE).itemsize == TOKEN_BYTES, "a token id is packed as u32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine is asked to do.

    Attributes:
        request_id: unique among the requests in the engine.
        packed_prompt: prompt token ids, u32 in native byte order; at least one.
        output_tokens: how many tokens to generate; at least one.
        seed: selects the pseudo answer, unsigned 64-bit; the same seed gives the same tokens.
        adapter: LoRA adapter name, None for the base model.
        adapter_id: its number, from 1.
        salt: cache salt; another salt is another cache.
        session_id: only passed on in events.
        keeps_blocks: its blocks stay held at its end, until `Engine.release_kept`.
        received: its prompt was computed elsewhere; only the last token is left to compute.
        category: of requests that an eviction policy may tell apart; None: not known.
    """

    request_id: str
    packed_prompt: bytes
    output_tokens: int
    seed: int = 0
    adapter: str | None = None
    adapter_id: int | None = None
    salt: str | None = None
    session_id: str | None = None
    keeps_blocks: bool = False
    received: bool = False
    category: Category | None = None

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


def root_hash(adapter: str | None, salt: str | None) -> int:
    """Start of a hash chain; another adapter or salt is a disjoint cache."""
    return xxhash.xxh3_64_intdigest(repr((adapter, salt)).encode())


def extend_hashes(hashes: list[int], root: int, packed: bytes | bytearray, stride: int) -> None:
    """Append the hashes of those full blocks of `packed` that `hashes` does not have yet.

    A block's hash is xxh3_64 of its tokens, seeded with the hash of the block before it.

    Args:
        hashes: hashes of the leading blocks, extended in place.
        root: from `root_hash`.
        packed: tokens, u32 in native byte order; a partial last block is ignored.
        stride: bytes per block.
    """
    digest = xxhash.xxh3_64_intdigest
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * stride, len(packed) - stride + 1, stride):
        parent = digest(packed[start : start + stride], parent)
        hashes.append(parent)


class ActiveRequest:
    """A request's progress, owned by the engine.

    Attributes:
        request: what was asked.
        packed: prompt and, as far as blocks needed them, output tokens.
        token_count: prompt tokens plus generated ones.
        computed_tokens: tokens whose KV$ exists; the newest generated token never is.
        generated_tokens: output tokens so far.
        block_ids: blocks held, in chain order.
        hashes: of the leading full blocks; they survive a preemption.
        stored_blocks: leading blocks that are resident under their hash.
        hit_tokens: prompt tokens resident on the device at first admission; None before it.
        preemption_count: how often it was evicted and recomputed.
    """

    __slots__ = (
        "block_ids",
        "computed_tokens",
        "generated_tokens",
        "hashes",
        "hit_tokens",
        "packed",
        "preemption_count",
        "request",
        "root",
        "stored_blocks",
        "token_count",
    )

    def __init__(self, request: Request, block_size_tokens: int) -> None:
        self.request = request
        self.packed = bytearray(request.packed_prompt)
        self.token_count = request.prompt_tokens
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.block_ids: list[int] = []
        self.root = root_hash(request.adapter, request.salt)
        self.hashes: list[int] = []
        self.stored_blocks = 0
        self.hit_tokens: int | None = None
        self.preemption_count = 0
        extend_hashes(
            self.hashes, self.root, request.packed_prompt, block_size_tokens * TOKEN_BYTES
        )

    def materialize(self, blocks: int, block_size_tokens: int, output_ids: Sequence[int]) -> None:
        """Write out generated tokens and hash, until the first `blocks` blocks have a hash."""
        wanted = blocks * block_size_tokens
        seed, prompt_tokens = self.request.seed, self.request.prompt_tokens
        choice_count = len(output_ids)
        missing = range(len(self.packed) // TOKEN_BYTES - prompt_tokens, wanted - prompt_tokens)
        self.packed += pack_tokens(
            [output_ids[output_index(seed, position, choice_count)] for position in missing]
        )
        extend_hashes(self.hashes, self.root, self.packed, block_size_tokens * TOKEN_BYTES)

    def forget_blocks(self) -> list[int]:
        """Back to nothing computed; returns the blocks it held."""
        held, self.block_ids = self.block_ids, []
        self.computed_tokens = 0
        self.stored_blocks = 0
        return held
