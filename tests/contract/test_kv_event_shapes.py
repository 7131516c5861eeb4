"""Every shape of KV event, from golden bytes to the blocks that may be credited."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from golden.encode_by_hand import PROMPT, STORIES, encoded

from indexer.contract import block_hash
from indexer.engine.vllm_events import BlockRemoved, BlockStored, Event, decode_batch
from indexer.table.block_table import BlockTable

GOLDEN = Path(__file__).parent.parent / "golden"
SHAPES = json.loads((GOLDEN / "kv_event_shapes.json").read_text())
DYNAMO = json.loads((GOLDEN / "dynamo_1_6_kv_events.json").read_text())

ROOT = block_hash.root(model_scope="m", block_size_tokens=16)
CHAIN = block_hash.split(block_hash.chain(ROOT, block_hash.pack_tokens(PROMPT), 16))

named = pytest.mark.parametrize("story", SHAPES["stories"], ids=lambda story: story["name"])


def depth_blocks(table: BlockTable) -> int:
    """Leading blocks of the prompt that are published."""
    published = set(table.published())
    return next((i for i, own in enumerate(CHAIN) if own not in published), len(CHAIN))


@named
def test_shapes_credit_the_right_depth(story: dict[str, Any]) -> None:
    """After each message exactly the leading blocks that the device surely holds are credited."""
    table = BlockTable(model_scope="m", block_size_tokens=16)
    depths = []
    for step in story["steps"]:
        batch = decode_batch(bytes.fromhex(step["payload_hex"]))
        assert batch.malformed_count == 0
        for event in batch.events:
            table.apply(event)
        depths.append(depth_blocks(table))
    assert [step["depth_blocks"] for step in story["steps"]] == depths


@named
def test_bytes_are_what_was_meant(story: dict[str, Any]) -> None:
    """The hand-made bytes are msgpack of the values they are said to be."""
    messages = [json.loads(json.dumps(m, default=repr)) for m, _ in STORIES[story["name"]][1]]
    read = [
        msgpack.unpackb(bytes.fromhex(step["payload_hex"]), strict_map_key=False)
        for step in story["steps"]
    ]
    assert messages == [json.loads(json.dumps(one, default=repr)) for one in read]


def test_file_is_what_its_encoder_writes() -> None:
    """The committed bytes and the encoder beside them belong together."""
    assert encoded() == SHAPES


def dynamo(name: str) -> tuple[Event, ...]:
    """Events of a frame recorded from Dynamo's mocker."""
    (sample,) = (one for one in DYNAMO["samples"] if one["name"] == name)
    batch = decode_batch(bytes.fromhex(sample["frames_hex"][2]))
    assert (batch.unknown_count, batch.malformed_count) == (0, 0)
    return batch.events


def test_dynamo_store() -> None:
    """Another publisher of the same wire leaves out what is at its default: the device is meant."""
    (event,) = dynamo("prefill_root")
    assert isinstance(event, BlockStored)
    assert (len(event.hashes), event.parent, event.block_size_tokens) == (3, None, 16)
    assert (event.medium, event.group, event.decides, event.adapter) == ("GPU", 0, True, None)
    assert block_hash.pack_tokens(range(100, 148)) == event.tokens


def test_dynamo_evictions() -> None:
    """Its removals name several hashes at once, tails first, ahead of the store."""
    removal, store = dynamo("evicted_and_stored")
    assert isinstance(removal, BlockRemoved)
    assert isinstance(store, BlockStored)
    (first,) = dynamo("prefill_root")
    assert isinstance(first, BlockStored)
    assert list(first.hashes) == list(reversed(removal.hashes))


def test_dynamo_decode_block() -> None:
    """A block filled while decoding names its parent; ids beyond any vocabulary are ids too."""
    (event,) = dynamo("decode_with_parent")
    assert isinstance(event, BlockStored)
    assert event.parent is not None
    assert len(event.tokens) == 16 * 4
