"""KV events of the simulated engine, as plain values in the order the engine produced them."""

from dataclasses import dataclass

DEVICE_MEDIUM = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Full blocks that became resident, in chain order.

    Attributes:
        block_hashes: engine hashes, unsigned 64-bit; one per block.
        parent_block_hash: engine hash of the block before the first one; None at position 0.
        packed_tokens: the blocks' token ids, u32 in native byte order.
        block_size_tokens: tokens per block.
        adapter: LoRA adapter name; part of every block's identity.
        adapter_id: the adapter's number, from 1; None for the base model.
        salt: the request's cache salt; part of the first block's identity.
        session_id: session the request said it belongs to.
        medium: where they are, as vLLM calls it.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    packed_tokens: bytes
    block_size_tokens: int
    adapter: str | None = None
    adapter_id: int | None = None
    salt: str | None = None
    session_id: str | None = None
    medium: str = DEVICE_MEDIUM


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Blocks evicted to make room, in eviction order; the wire carries one event per hash."""

    block_hashes: tuple[int, ...]
    medium: str = DEVICE_MEDIUM


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksCleared:
    """Every block was dropped at once (prefix cache reset)."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared
