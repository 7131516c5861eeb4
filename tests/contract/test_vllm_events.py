"""Decoding of recorded and hand-made event bytes."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from indexer.contract.block_hash import pack_tokens
from indexer.engine.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
)
from indexer.errors import MalformedBatch

GOLDEN = Path(__file__).parent.parent / "golden"
REAL = json.loads((GOLDEN / "vllm_0_32_kv_events.json").read_text())
OTHER = json.loads((GOLDEN / "kv_events_other_encodings.json").read_text())
EIGHT = pack_tokens(range(8))


def real(name: str) -> tuple[Event, ...]:
    """Events of the recorded sample of this name."""
    (sample,) = (one for one in REAL["samples"] if one["name"] == name)
    batch = decode_batch(bytes.fromhex(sample["frames_hex"][2]))
    assert (batch.unknown_count, batch.malformed_count) == (0, 0)
    return batch.events


def stored(**changes: Any) -> BlockStored:
    """Two blocks of four tokens."""
    values: dict[str, Any] = {
        "hashes": [1, 2],
        "parent": None,
        "tokens": EIGHT,
        "block_size_tokens": 4,
    }
    return BlockStored(**(values | changes))


def test_real_prefill() -> None:
    """A prefill stores all its new full blocks in one event without a parent."""
    (event,) = real("prefill_root")
    assert isinstance(event, BlockStored)
    assert (len(event.hashes), event.parent, event.block_size_tokens) == (10, None, 32)
    assert len(event.tokens) == 10 * 32 * 4
    assert event.hashes[0] == 972680052291209254
    assert pack_tokens([1, 2801, 201]) == event.tokens[:12]
    assert (event.adapter, event.salt, event.extra_keys) == (None, None, None)


def test_real_decode_block_names_its_parent() -> None:
    """A block filled while decoding comes alone and names the block before it."""
    (event,) = real("decode_with_parent")
    assert isinstance(event, BlockStored)
    assert [event.parent] == [1978356515219766250]
    assert len(event.hashes) == 1


def test_real_evictions_come_before_the_store() -> None:
    """Evictions are one event a block, in the batch of the store that needed the room."""
    events = real("evicted_and_stored")
    assert [BlockRemoved] * 13 + [BlockStored] == [type(event) for event in events]


def test_real_reset() -> None:
    """A reset arrives as AllBlocksCleared ahead of the next store."""
    assert [AllBlocksCleared, BlockStored] == [type(event) for event in real("cleared_and_stored")]


def test_real_cache_salt() -> None:
    """The salt stands bare among the first block's extra keys and belongs to the prompt."""
    (event,) = real("salt_and_session")
    assert isinstance(event, BlockStored)
    assert (event.salt, event.extra_keys) == ("tenant-a", None)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, stored()),
        (1, stored(adapter="ada", salt="salt", extra_keys=[(["mm", 5],), ()])),
        (2, stored(parent=7, group=1)),
        (3, stored(hashes=[-1, -2], parent=-3)),
        (4, stored(hashes=[b"\1" * 32, b"\2" * 32], parent=b"\3" * 32)),
        (5, BlockRemoved(hashes=[1, 2])),
        (6, BlockRemoved(hashes=[1], medium="CPU", group=2)),
        (7, AllBlocksCleared()),
        (8, BlockRemoved(hashes=[1, 2])),
        (9, BlockRemoved(hashes=[1, 2])),
    ],
    ids=[payload["note"] for payload in OTHER["payloads"]],
)
def test_other_encodings(number: int, expected: Event) -> None:
    """Every encoding in the wild means the same events."""
    batch = decode_batch(bytes.fromhex(OTHER["payloads"][number]["payload_hex"]))
    assert (10.5, (expected,)) == (batch.ts_s, batch.events)


def fields(**changes: object) -> dict[str, object]:
    """A map event of two blocks."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
    }
    return event | changes


GOOD = {"type": "BlockRemoved", "block_hashes": [5]}


@pytest.mark.parametrize(
    "bad",
    [
        fields(block_hashes="12"),
        fields(block_hashes=[1.5, 2]),
        fields(block_hashes=[True, 2]),
        fields(parent_block_hash=[1]),
        fields(token_ids=[1, 2, 3]),
        fields(token_ids=[-1] * 8),
        fields(token_ids=[1 << 32] * 8),
        fields(token_ids="abcdefgh"),
        fields(token_ids=bytes(32)),
        fields(block_size=0),
        fields(block_size=4.0),
        fields(extra_keys=[None]),
        fields(extra_keys=["ab", "cd"]),
        fields(lora_name=["x"]),
        fields(kv_cache_spec_kind=7),
        fields(group_idx="0"),
        fields(group_idx=-1),
        fields(medium=["GPU"]),
        fields(lora_id=[3]),
        {"type": "BlockStored"},
        {"type": "BlockRemoved", "block_hashes": None},
        {"no": "type"},
        ["BlockRemoved"],
        [],
        None,
        7,
    ],
)
def test_malformed_event_costs_only_itself(bad: object) -> None:
    """The events around an unreadable one are applied, and it is counted."""
    batch = decode_batch(msgpack.packb([1.0, [GOOD, bad, GOOD], 0]))
    good = BlockRemoved(hashes=[5])
    assert ((good, good), 1, 0) == (batch.events, batch.malformed_count, batch.unknown_count)


@pytest.mark.parametrize("unknown", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1]])
def test_unknown_event_type_is_skipped(unknown: object) -> None:
    """A newer engine's event types are counted, not fatal."""
    batch = decode_batch(msgpack.packb([1.0, [unknown, GOOD], 0]))
    assert ((BlockRemoved(hashes=[5]),), 1) == (batch.events, batch.unknown_count)


def test_unknown_fields_are_ignored() -> None:
    """Fields of a newer engine change nothing."""
    batch = decode_batch(msgpack.packb([1.0, [fields(novelty=1)], 0, "more", 2]))
    assert (stored(),) == batch.events


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", b"hello", msgpack.packb(7), msgpack.packb([1.0]), msgpack.packb({}),
     msgpack.packb([1.0, 5, 0]), msgpack.packb(["x", [], 0]),
     msgpack.packb(["1", [], 0]), msgpack.packb([float("nan"), [], 0]), b"\x91" * 2000],
)  # fmt: skip
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """Anything else raises one typed error."""
    with pytest.raises(MalformedBatch):
        decode_batch(payload)


def only(**changes: object) -> BlockStored:
    """The store event of a map with these changes."""
    (event,) = decode_batch(msgpack.packb([1.0, [fields(**changes)], 0])).events
    assert isinstance(event, BlockStored)
    return event


@pytest.mark.parametrize(
    ("kind", "group", "decides"),
    [
        (None, 0, True),
        (None, 1, False),
        ("full_attention", 1, True),
        ("mla_attention", 0, True),
        ("sliding_window", 0, False),
        ("mamba", 2, False),
    ],
)
def test_groups_that_decide(kind: str | None, group: int, decides: bool) -> None:
    """Only groups that keep whole prefixes end a hit with a hole."""
    assert decides == only(kv_cache_spec_kind=kind, group_idx=group).decides


def test_adapter_without_a_name_is_not_the_base_model() -> None:
    """An old engine that tells only the adapter's number never credits the base model."""
    assert only(lora_id=3).adapter == "#3"


def test_salt_is_taken_from_the_start_of_a_prompt_only() -> None:
    """Behind a parent a bare string is an extra key of its block."""
    event = only(parent_block_hash=9, extra_keys=[["digest"], None])
    assert (event.salt, event.extra_keys) == (None, [("digest",), ()])


def test_tagged_extra_keys() -> None:
    """Keys tagged with their kind mean the same as bare ones."""
    event = only(
        lora_name="ada", extra_keys=[[["lora", "ada"], ["cache_salt", "s"]], [["lora", "ada"]]]
    )
    assert (event.adapter, event.salt, event.extra_keys) == ("ada", "s", None)


def test_remote_blocks_are_not_on_the_device() -> None:
    """A block on another machine's accelerator does not count as this engine's."""
    assert only(locality="REMOTE").medium == "REMOTE GPU"
