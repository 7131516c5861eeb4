"""KV events in vLLM's wire shapes: msgpack of `[ts, [event, ...], data_parallel_rank]`.

MAP is what vLLM 0.31 and later send: maps with `type` first and defaults left out. ARRAY is what
came before: `["BlockStored", ...]` in field order, defaults cut off the tail. Field order and
defaults are those of the frames recorded from vLLM 0.32 (tests/golden). Pure.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache

import msgpack

from workers.simulated.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.request import unpack_tokens

GROUP_INDEX = 0
CACHE_SPEC_KIND = "full_attention"

BATCH_FIELDS = 3
PLACEHOLDER_HASH = (1 << 64) - 1

Fields = dict[str, object]


class EventEncoding(StrEnum):
    """How an event is laid out."""

    MAP = "map"
    ARRAY = "array"


def encode_batch(
    events: Sequence[KvEvent], *, ts: float, encoding: EventEncoding, data_parallel_rank: int = 0
) -> bytes:
    """One batch as the payload frame.

    Args:
        events: in engine order; removals become one wire event per hash.
        ts: wall clock, seconds since the epoch.
        encoding: layout of each event.
        data_parallel_rank: rank of the engine.
    """
    packed = [one for event in events for one in _pack_event(event, encoding)]
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(BATCH_FIELDS)
    packer.pack(ts)
    packer.pack_array_header(len(packed))
    return b"".join((packer.bytes(), *packed, msgpack.packb(data_parallel_rank)))


def _pack_event(event: KvEvent, encoding: EventEncoding) -> Iterable[bytes]:
    match event:
        case BlocksStored():
            return (_pack(_stored_fields(event), encoding),)
        case BlocksRemoved():
            before, after = _removed_shell(encoding, event.medium)
            pack = msgpack.Packer().pack
            return [before + pack(block_hash) + after for block_hash in event.block_hashes]
        case BlocksCleared():
            return (_pack({"type": "AllBlocksCleared"}, encoding),)


def _pack(fields: Fields, encoding: EventEncoding) -> bytes:
    laid_out = fields if encoding is EventEncoding.MAP else list(fields.values())
    # A salt or session id from a client may hold lone surrogates, which UTF-8 cannot carry.
    return bytes(msgpack.packb(laid_out, unicode_errors="replace"))


@cache
def _removed_shell(encoding: EventEncoding, medium: str) -> tuple[bytes, bytes]:
    """What stands around the hash of a removal: evictions come by the hundred."""
    fields = {
        "type": "BlockRemoved",
        "block_hashes": [PLACEHOLDER_HASH],
        "medium": medium,
        "group_idx": GROUP_INDEX,
    }
    before, after = _pack(fields, encoding).split(msgpack.packb(PLACEHOLDER_HASH))
    return before, after


def _stored_fields(event: BlocksStored) -> Fields:
    fields: Fields = {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent_block_hash,
        "token_ids": unpack_tokens(event.packed_tokens),
        "block_size": event.block_size_tokens,
        "lora_id": event.adapter_id,
        "medium": event.medium,
        "lora_name": event.adapter,
        "extra_keys": _extra_keys(event),
        "group_idx": GROUP_INDEX,
        "kv_cache_spec_kind": CACHE_SPEC_KIND,
    }
    if event.session_id is not None:
        fields["session_id"] = event.session_id
    return fields


def _extra_keys(event: BlocksStored) -> list[list[str] | None]:
    """Per block: the adapter in each, the salt in the block at position 0 only."""
    each = [event.adapter] if event.adapter is not None else None
    keys = [each] * len(event.block_hashes)
    if event.salt is not None and event.parent_block_hash is None:
        keys[0] = [*(each or []), event.salt]
    return keys
