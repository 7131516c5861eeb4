"""KV events from the wire to plain values: every encoding vLLM and its relatives are known to send.

A batch is an array `[ts, events, rank, ...]` or a map with those names. An event is a map with
`type`, or an array `[type, fields in order...]` whose defaulted tail may be cut off. Hashes are
ints (also negative) or bytes. Unknown fields are ignored; unknown event types and malformed events
are counted and skipped, so that a foreign message costs only itself.

Source: vllm/distributed/kv_events.py, 0.11 to 0.32; frames in tests/golden.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from indexer.contract.block_hash import TOKEN_BYTES, pack_tokens
from indexer.contract.identifiers import EngineBlockHash
from indexer.errors import MalformedBatch

DEVICE_MEDIUM: Final = "GPU"
"""Medium of the accelerator's own memory; also meant where an event names none."""

BATCH_FIELDS: Final = ("ts", "events", "data_parallel_rank")
STORED_FIELDS: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
REMOVED_FIELDS: Final = ("type", "block_hashes", "medium", "group_idx", "locality", "ownership")

PARTIAL_KINDS: Final = ("sliding", "chunked", "mamba", "cross", "encoder")
"""Beginnings of the group kinds that keep only a part of a prefix: they hold holes by design, so a
missing block of theirs does not end a hit."""

HASH_TYPES: Final = frozenset((int, bytes))
TEXT_TYPES: Final = frozenset((str, type(None)))
ADAPTER_NUMBER_TYPES: Final = frozenset((int, str, type(None)))
EXTRA_KEYS_TYPES: Final = frozenset((list, type(None)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks became resident, one after the other behind `parent`.

    Attributes:
        hashes: the engine's names of the blocks.
        parent: the block before the first one; None at the start of a prompt.
        tokens: their token ids as little-endian u32; empty where an emitter tells none.
        block_size_tokens: tokens of one block.
        medium: `GPU`, or where else.
        group: KV cache group.
        decides: whether a hole in this group ends a prefix hit.
        adapter: LoRA adapter, None for the base model.
        salt: cache salt of the prompt, told at its start; None for none.
        extra_keys: what else makes a block what it is (multimodal identity and offset, digest of
            prompt embeddings), one entry per block; None where no block has any.
    """

    hashes: Sequence[EngineBlockHash]
    parent: EngineBlockHash | None
    tokens: bytes
    block_size_tokens: int
    medium: str = DEVICE_MEDIUM
    group: int = 0
    decides: bool = True
    adapter: str | None = None
    salt: str | None = None
    extra_keys: Sequence[tuple[object, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One copy of each of these blocks was evicted."""

    hashes: Sequence[EngineBlockHash]
    medium: str = DEVICE_MEDIUM
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine dropped its whole prefix cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The events of one engine step, in order.

    Attributes:
        ts_s: engine's wall clock when it was made.
        events: what could be read.
        unknown_count: events of a type not known here.
        malformed_count: events of a known type that could not be read.
        hides_removals: one of those may have told that blocks are gone.
    """

    ts_s: float
    events: tuple[Event, ...]
    unknown_count: int = 0
    malformed_count: int = 0
    hides_removals: bool = False


def decode_batch(payload: bytes) -> Batch:
    """Decode the payload of one message.

    Raises:
        MalformedBatch: the payload is not a batch at all.
    """
    try:
        batch = _fields(msgpack.unpackb(payload, strict_map_key=False), BATCH_FIELDS)
        ts_s, raw_events = _time(batch["ts"]), _list(batch["events"])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedBatch(f"not a batch of KV events: {error!r}") from error
    events: list[Event] = []
    unknown_count = malformed_count = 0
    hides_removals = False
    for raw in raw_events:
        try:
            event = _event(raw)
        except (ValueError, TypeError, KeyError, OverflowError):
            malformed_count += 1
            hides_removals |= _kind(raw) != "BlockStored"
            continue
        if event is None:
            unknown_count += 1
        else:
            events.append(event)
    return Batch(
        ts_s=ts_s,
        events=tuple(events),
        unknown_count=unknown_count,
        malformed_count=malformed_count,
        hides_removals=hides_removals,
    )


def _fields(raw: object, names: Sequence[str]) -> Mapping[str, Any]:
    """A map as it is, an array with the names of its positions; raises TypeError for the rest."""
    if isinstance(raw, dict):
        return raw
    if isinstance(raw, list):
        return dict(zip(names, raw, strict=False))
    raise TypeError(f"neither map nor array: {type(raw).__name__}")


def _time(raw: Any) -> float:
    if type(raw) not in (int, float) or not math.isfinite(raw):
        raise TypeError(f"no time: {raw!r:.50}")
    return float(raw)


def _list(raw: object) -> list[Any]:
    if isinstance(raw, list):
        return raw
    raise TypeError(f"not a list: {type(raw).__name__}")


def _kind(raw: object) -> object:
    """What an event says it is."""
    if isinstance(raw, dict):
        return raw.get("type")
    return raw[0] if isinstance(raw, list) and raw else raw


def _event(raw: object) -> Event | None:
    """One event, None for an unknown type; raises when it cannot be read."""
    match _kind(raw):
        case "BlockStored":
            return _stored(_fields(raw, STORED_FIELDS))
        case "BlockRemoved":
            event = _fields(raw, REMOVED_FIELDS)
            return BlockRemoved(
                hashes=_hashes(event["block_hashes"]), medium=_medium(event), group=_group(event)
            )
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case str():
            return None
        case _:
            raise TypeError("an event has no type")


def _stored(event: Mapping[str, Any]) -> BlockStored:
    get = event.get
    hashes = _hashes(event["block_hashes"])
    parent = event["parent_block_hash"]
    if parent is not None:
        _hashes([parent])
    tokens = pack_tokens(_list(event["token_ids"]))
    block_size_tokens = event["block_size"]
    if type(block_size_tokens) is not int:
        raise TypeError("a block size is not an int")
    if tokens and len(tokens) != TOKEN_BYTES * len(hashes) * block_size_tokens:
        raise ValueError(
            f"{len(tokens) // 4} tokens in {len(hashes)} blocks of {block_size_tokens}"
        )
    adapter, kind = get("lora_name"), get("kv_cache_spec_kind")
    number = get("lora_id")
    if not (
        type(adapter) in TEXT_TYPES
        and type(kind) in TEXT_TYPES
        and type(number) in ADAPTER_NUMBER_TYPES
    ):
        raise TypeError("an adapter or a group kind is not a string")
    if adapter is None and number is not None:
        adapter = f"#{number}"  # an engine too old to tell the name; never the base model
    group = _group(event)
    salt, extra_keys = _extra_keys(get("extra_keys"), hashes, adapter, starts_prompt=parent is None)
    return BlockStored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size_tokens=block_size_tokens,
        medium=_medium(event),
        group=group,
        decides=group == 0 if kind is None else not kind.startswith(PARTIAL_KINDS),
        adapter=adapter,
        salt=salt,
        extra_keys=extra_keys,
    )


def _extra_keys(
    raw: Any, hashes: Sequence[EngineBlockHash], adapter: str | None, *, starts_prompt: bool
) -> tuple[str | None, Sequence[tuple[object, ...]] | None]:
    """Cache salt and the blocks' own extra keys.

    The engine has one list per block: the adapter's name, multimodal identities, in the first block
    of a prompt the cache salt, then digests of embeddings; bare, or tagged with their kind.
    """
    if raw is None:
        return None, None
    if len(raw) != len(hashes) or not set(map(type, raw)) <= EXTRA_KEYS_TYPES:
        raise ValueError("extra keys are not one list per block")
    if not any(raw):
        return None, None
    salt: str | None = None
    extra_keys = [
        tuple(
            key for key in keys or () if adapter is None or key not in (adapter, ["lora", adapter])
        )
        for keys in raw
    ]
    if starts_prompt:
        salts = [key for key in extra_keys[0] if _salt(key) is not None]
        if salts:
            salt = _salt(salts[-1])
            extra_keys[0] = tuple(key for key in extra_keys[0] if key is not salts[-1])
    return salt, extra_keys if any(extra_keys) else None


def _salt(key: object) -> str | None:
    match key:
        case str():
            return key
        case ["cache_salt", str() as salt]:
            return salt
        case _:
            return None


def _hashes(hashes: Any) -> list[EngineBlockHash]:
    if not isinstance(hashes, list) or not set(map(type, hashes)) <= HASH_TYPES:
        raise TypeError("block hashes are neither ints nor bytes")
    return hashes


def _medium(event: Mapping[str, Any]) -> str:
    medium = event.get("medium")
    if type(medium) not in TEXT_TYPES:
        raise TypeError("a medium is not a string")
    medium = medium or DEVICE_MEDIUM
    if event.get("locality") == "REMOTE":
        return f"REMOTE {medium}"  # another machine's accelerator is not this device
    return str(medium)


def _group(event: Mapping[str, Any]) -> int:
    group = event.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int or group < 0:
        raise ValueError("a group is not a number from 0 on")
    return group
