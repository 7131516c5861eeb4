"""Writes kv_event_shapes.json: the shapes of KV events that no engine here sends.

    python tests/golden/encode_by_hand.py

The bytes come from the small msgpack encoder below, which shares nothing with what decodes them in
the sidecar; field names and orders are those of vllm/distributed/kv_events.py (0.11 to 0.32) and of
SGLang's and llm-d's emitters. Every story tells of one prompt of four blocks of 16 tokens (ids from
1000 on), and after each message how many leading blocks of it may be credited.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("kv_event_shapes.json")

BLOCK_TOKENS = 16
PROMPT = list(range(1000, 1064))
TS = 10.5

_INTS = (("B", 0xCC, 0xD0), ("H", 0xCD, 0xD1), ("I", 0xCE, 0xD2), ("Q", 0xCF, 0xD3))


def pack(value: object) -> bytes:
    """Msgpack, shortest form of everything but floats, which have 8 bytes."""
    match value:
        case None:
            packed = b"\xc0"
        case int():
            packed = _pack_int(value)
        case float():
            packed = b"\xcb" + struct.pack(">d", value)
        case str():
            raw = value.encode()
            packed = _head(len(raw), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + raw
        case bytes():
            packed = _head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
        case Mapping():
            pairs = b"".join(pack(key) + pack(item) for key, item in value.items())
            packed = _head(len(value), 0x80, 16, (None, 0xDE, 0xDF)) + pairs
        case Sequence():
            packed = _head(len(value), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(pack, value))
        case _:
            raise TypeError(type(value).__name__)
    return packed


def _pack_int(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value) if value < 0 else bytes([value])
    for code, unsigned, signed in _INTS:
        bits = struct.calcsize(code) * 8
        if 0 <= value < 1 << bits:
            return bytes([unsigned]) + struct.pack(">" + code, value)
        if -(1 << bits - 1) <= value < 0:
            return bytes([signed]) + struct.pack(">" + code.lower(), value)
    raise OverflowError(value)


def _head(length: int, fixed: int, fixed_below: int, heads: Sequence[int | None]) -> bytes:
    if length < fixed_below:
        return bytes([fixed | length])
    for head, code in zip(heads, "BHI", strict=True):
        if head is not None and length < 1 << struct.calcsize(code) * 8:
            return bytes([head]) + struct.pack(">" + code, length)
    raise OverflowError(length)


def tokens(first: int, last: int) -> list[int]:
    """Token ids of the prompt's blocks, both counted from 0 and included."""
    return PROMPT[first * BLOCK_TOKENS : (last + 1) * BLOCK_TOKENS]


def store(hashes: Sequence[object], blocks: tuple[int, int], **fields: object) -> dict[str, object]:
    """BlockStored as a map with the fields that are always there."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": tokens(*blocks),
        "block_size": BLOCK_TOKENS,
    }
    return event | fields


def remove(hashes: Sequence[object], **fields: object) -> dict[str, object]:
    """BlockRemoved as a map."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **fields}


def store_array(
    hashes: Sequence[object], blocks: tuple[int, int], parent: object = None, *tail: object
) -> list[object]:
    """BlockStored in field order; the tail goes on with lora_id, medium, lora_name, ..."""
    return ["BlockStored", list(hashes), parent, tokens(*blocks), BLOCK_TOKENS, *tail]


def batch(*events: object, rank: int | None = 0) -> list[object]:
    """A batch as an array."""
    return [TS, list(events), rank]


def digest(number: int, length: int) -> bytes:
    """A digest of this length."""
    return bytes([number]) * length


WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
FULL = {"kv_cache_spec_kind": "full_attention"}
FOUR = [1, 2, 3, 4]

STORIES: dict[str, tuple[str, list[tuple[object, int]]]] = {
    "array_events": (
        "vLLM before 0.31: events as arrays, defaults cut off the tail",
        [
            (batch(store_array([1, 2], (0, 1), None, None)), 2),
            (batch(store_array([3, 4], (2, 3), 2, None, "GPU", None, [None, None], 0)), 4),
            (batch(["BlockRemoved", [4]]), 3),
            (batch(["BlockRemoved", [3], "GPU", 0]), 2),
            (batch(["AllBlocksCleared"]), 0),
        ],
    ),
    "map_batch": (
        "batch as a map, with map events and with array events, fields in another order",
        [
            ({"ts": TS, "events": [store([1, 2], (0, 1))], "data_parallel_rank": 0}, 2),
            ({"events": [store_array([3, 4], (2, 3), 2)], "ts": TS}, 4),
            ({"data_parallel_rank": None, "ts": TS, "events": [remove([3])], "novelty": {}}, 2),
        ],
    ),
    "short_and_long_batches": (
        "batch without a rank, with a nil rank, with more fields than known, without events",
        [
            ([TS, [store([1, 2], (0, 1))]], 2),
            (batch(store([3, 4], (2, 3), parent_block_hash=2), rank=None), 4),
            ([*batch(remove([4])), "novelty", 7], 3),
            (batch(), 3),
        ],
    ),
    "sha256_digests": (
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 with sha256: whole digests of 32 bytes",
        [
            (batch(store([digest(n, 32) for n in FOUR[:2]], (0, 1))), 2),
            (
                batch(
                    store(
                        [digest(n, 32) for n in FOUR[2:]],
                        (2, 3),
                        parent_block_hash=digest(2, 32),
                    )
                ),
                4,
            ),
            (batch(remove([digest(2, 32)])), 1),
        ],
    ),
    "xxhash_digests": (
        "the same with xxhash: 16 bytes",
        [
            (batch(store([digest(n, 16) for n in FOUR], (0, 3))), 4),
            (batch(remove([digest(4, 16)])), 3),
        ],
    ),
    "signed_hashes": (
        "SGLang: array events, hashes as signed 64-bit ints, cleared at sequence 0",
        [
            ([TS, [["AllBlocksCleared"]], 0], 0),
            (batch(store_array([-1, -(2**63)], (0, 1), None, None, "GPU")), 2),
            (batch(store_array([2**63 - 1, -7], (2, 3), -(2**63), None, "GPU")), 4),
            (batch(["BlockRemoved", [-7], "GPU"]), 3),
        ],
    ),
    "unsigned_hashes": (
        "vLLM: the low 64 bits of the digest, above 2^63 as well",
        [
            (batch(store([2**64 - 1, 2**63], (0, 1))), 2),
            (batch(store([0, 5], (2, 3), parent_block_hash=2**63)), 4),
            (batch(remove([0])), 2),
        ],
    ),
    "unknown_types_and_fields": (
        "event types and fields of a newer engine between known ones",
        [
            (batch(store([1, 2], (0, 1), event_version=2, origin="NEW", novelty={"a": [1]})), 2),
            (
                batch(
                    {"type": "BlockMoved", "block_hashes": [1], "to": "CPU"},
                    ["BlockPinned", [2]],
                    store([3, 4], (2, 3), parent_block_hash=2, session_id="s", ownership=None),
                ),
                4,
            ),
            (batch(remove([4], reason="lru"), {"type": "AllGood"}), 3),
        ],
    ),
    "media": (
        "copies on other media credit nothing and keep nothing, those of the device decide",
        [
            (batch(store(FOUR, (0, 3), medium="GPU", locality="LOCAL")), 4),
            (batch(store(FOUR, (0, 3), medium="CPU", ownership="pool-1")), 4),
            (batch(store(FOUR, (0, 3), medium="CPU_PINNED")), 4),
            (batch(store_array(FOUR, (0, 3), None, None, "DISK")), 4),
            (batch(store(FOUR, (0, 3), medium="STORAGE", locality="REMOTE")), 4),
            (batch(store_array(FOUR, (0, 3), None, None, "SHARED_STORAGE")), 4),
            (batch(remove([4], medium="CPU"), remove([4], medium="DISK")), 4),
            (batch(remove([4], medium="GPU")), 3),
            (batch(remove([3])), 2),
            (batch(remove([2], medium="STORAGE", locality="REMOTE")), 2),
            (batch(remove([2], medium="EXTERNAL")), 2),
        ],
    ),
    "elsewhere_only": (
        "blocks on the host, on a disk, or on another machine's GPU are no hit of this device",
        [
            (batch(store(FOUR, (0, 3), medium="CPU")), 0),
            (batch(store(FOUR, (0, 3), medium="GPU", locality="REMOTE", ownership="o")), 0),
            (batch(store(FOUR, (0, 3), medium="EXTERNAL")), 0),
            # vLLM's offloading connector tells neither tokens nor a block size.
            (batch(store(FOUR, (0, -1), block_size=0, medium="CPU")), 0),
            (batch(store(FOUR[:2], (0, 1), medium="GPU")), 2),
        ],
    ),
    "full_and_sliding_and_mamba": (
        "a hybrid model: holes in the groups that keep a part of a prefix end no hit",
        [
            (
                batch(
                    store(FOUR, (0, 3), group_idx=0, **FULL),
                    store(FOUR, (0, 3), group_idx=1, **WINDOW),
                    store(FOUR, (0, 3), group_idx=2, kv_cache_spec_kind="mamba"),
                ),
                4,
            ),
            (batch(remove([1, 2], group_idx=1), remove([1, 2, 3], group_idx=2)), 4),
            (batch(remove([4], group_idx=0)), 3),
            (batch(store([4], (3, 3), parent_block_hash=3, group_idx=1, **WINDOW)), 3),
        ],
    ),
    "two_deciding_groups": (
        "full attention in two groups, positional: the shorter one decides",
        [
            (
                batch(
                    store_array(FOUR, (0, 3), None, None, "GPU", None, None, 0, "full_attention"),
                    store_array(
                        FOUR[:2], (0, 1), None, None, "GPU", None, None, 3, "mla_attention"
                    ),
                ),
                2,
            ),
            (batch(store(FOUR[2:], (2, 3), parent_block_hash=2, group_idx=3, **FULL)), 4),
            (batch(remove([2], group_idx=3)), 1),
            (batch(store([2], (1, 1), parent_block_hash=1, group_idx=3, **FULL)), 4),
            (batch(["BlockRemoved", [1], "GPU", 0]), 0),
        ],
    ),
    "reference_counts": (
        "one hash held by two physical blocks is stored twice and removed twice",
        [
            (batch(store(FOUR, (0, 3)), store(FOUR, (0, 3))), 4),
            (batch(remove(FOUR)), 4),
            (batch(remove([3])), 2),
        ],
    ),
    "a_whole_batch_of_evictions": (
        "256 removals in one batch, one of them ours",
        [
            (batch(store(FOUR, (0, 3))), 4),
            (batch(*(["BlockRemoved", [n]] for n in range(4, 260))), 3),
        ],
    ),
    "unknown_parent_and_removal": (
        "a late joiner: a parent never seen is not the start of a prompt, removals of strangers",
        [
            (batch(store([3, 4], (2, 3), parent_block_hash=2)), 0),
            (batch(remove([99])), 0),
            (batch(store([2], (1, 1), parent_block_hash=1)), 0),
            (batch(store([1], (0, 0))), 4),
        ],
    ),
    "other_prompts": (
        "adapter, cache salt and multimodal keys make another prompt of the same tokens",
        [
            (batch(store(FOUR, (0, 3), lora_id=1, lora_name="ada")), 0),
            (batch(store([5], (0, 0), extra_keys=[["salt"]])), 0),
            (batch(store([6], (0, 0), extra_keys=[[["cache_salt", "salt"]]])), 0),
            (batch(store([7], (0, 0), extra_keys=[[["image-hash", 3]]])), 0),
            (batch(store([8], (0, 0), lora_id=2)), 0),
            (batch(store([9, 10], (0, 1), extra_keys=[None, [["image-hash", 0]]])), 1),
        ],
    ),
}


def encoded() -> dict[str, Any]:
    """The content of the file."""
    return {
        "source": "tests/golden/encode_by_hand.py: encoded by hand, recorded from no engine",
        "prompt": "token ids 1000 to 1063, four blocks of 16",
        "stories": [
            {
                "name": name,
                "note": note,
                "steps": [
                    {"payload_hex": pack(message).hex(), "depth_blocks": depth}
                    for message, depth in steps
                ],
            }
            for name, (note, steps) in STORIES.items()
        ],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(encoded(), indent=1) + "\n")
