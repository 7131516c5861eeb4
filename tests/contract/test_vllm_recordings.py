"""Decoding of what real vLLM 0.32 sent: byte hashes, adapters, salts, ranks, a replay."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from indexer.contract.block_hash import pack_tokens
from indexer.engine.event_source import EventSource, parse_sources
from indexer.engine.ring import END_OF_REPLAY, REPLAY_FRAMES
from indexer.engine.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
)

GOLDEN = Path(__file__).parent.parent / "golden"
BLOCK = 32


def recording(name: str) -> dict[str, Any]:
    """A file recorded by tests/vllm/record_frames.py."""
    recorded: dict[str, Any] = json.loads((GOLDEN / f"vllm_0_32_{name}.json").read_text())
    return recorded


def frames(recorded: dict[str, Any], name: str) -> list[bytes]:
    """Topic, sequence, payload of a sample."""
    (sample,) = (one for one in recorded["samples"] if one["name"] == name)
    return [bytes.fromhex(frame) for frame in sample["frames_hex"]]


def events(recorded: dict[str, Any], name: str) -> tuple[Event, ...]:
    """Events of a sample, all of them readable."""
    batch = decode_batch(frames(recorded, name)[2])
    assert (batch.unknown_count, batch.malformed_count) == (0, 0)
    return batch.events


def stored(recorded: dict[str, Any], name: str) -> BlockStored:
    """The store that ends a sample."""
    event = events(recorded, name)[-1]
    assert isinstance(event, BlockStored)
    return event


def prompt(seed: int, blocks: int) -> bytes:
    """Token ids of the recorded prompts, packed."""
    return pack_tokens([(seed * 31 + i * 7) % 100 + 3 for i in range(blocks * BLOCK)])


BYTES = recording("byte_hashes")
ADAPTERS = recording("adapters")
RANKS = recording("ranks")


def test_whole_digests_as_names() -> None:
    """With integer hashes off a block's name is the whole digest, its parent's as well."""
    event = stored(BYTES, "stored")
    assert ([len(name) for name in event.hashes], len(event.parent or b"")) == ([32], 32)
    assert prompt(1, 2)[BLOCK * 4 :] == event.tokens
    assert stored(BYTES, "cleared").hashes == [event.parent]  # the same prompt's first block


def test_a_decoded_block_names_the_prompts_last_one() -> None:
    """A block filled while decoding starts with the tokens of the prompt beyond its last block."""
    event = stored(BYTES, "decoded")
    assert event.parent is not None
    assert event.tokens[:4] == pack_tokens([6])


def test_one_hash_stored_twice_and_removed_twice() -> None:
    """A repeated prompt of whole blocks is stored again under the same name; both copies go."""
    first, again = stored(BYTES, "aligned"), stored(BYTES, "stored_twice")
    assert first == again
    removed = Counter(
        name
        for event in events(BYTES, "evicted")
        if isinstance(event, BlockRemoved)
        for name in event.hashes
    )
    assert removed[first.hashes[0]] == 2
    assert len(removed) + 1 == removed.total()


def test_evictions_come_tails_first() -> None:
    """A prompt's second block is removed before its first one, in the batch of the next store."""
    second = stored(BYTES, "stored")
    order = [
        event.hashes[0] for event in events(BYTES, "evicted") if isinstance(event, BlockRemoved)
    ]
    assert order.index(second.hashes[0]) < order.index(second.parent or b"")


def test_cleared_by_reset_and_by_sleep() -> None:
    """Both are told ahead of the next store."""
    for recorded, name in ((BYTES, "cleared"), (ADAPTERS, "slept")):
        assert [AllBlocksCleared, BlockStored] == [type(event) for event in events(recorded, name)]


@pytest.mark.parametrize(
    ("name", "adapter", "salt"),
    [
        ("adapter", "adapter-a", None),
        ("adapter_and_salt", "adapter-b", "tenant-a"),
        ("adapter_and_salt_behind_a_parent", "adapter-b", None),
        ("salt", None, "tenant-a"),
    ],
)
def test_adapters_and_salts(name: str, adapter: str | None, salt: str | None) -> None:
    """A store names its adapter always, its salt at the start of a prompt; nothing is left over."""
    event = stored(ADAPTERS, name)
    assert (adapter, salt, None) == (event.adapter, event.salt, event.extra_keys)
    assert (salt is None and adapter == "adapter-b") == (event.parent is not None)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_publisher(rank: int) -> None:
    """Ranks count from 0 each, tell their number, and name the same block alike."""
    topic, sequence, payload = frames(RANKS, f"rank_{rank}")
    assert (topic, int.from_bytes(sequence, "big")) == (b"kv@dp", 0)
    assert decode_batch(payload).events == events(RANKS, "rank_0")


def test_sources_of_two_ranks() -> None:
    """The engine tells each rank's ports, already shifted by the rank."""
    assert parse_sources(RANKS["kv_event_sources"]) == [
        EventSource(
            rank=rank,
            endpoint=f"tcp://*:{21111 + rank}",
            replay_endpoint=f"tcp://*:{21113 + rank}",
            topic="kv@dp",
        )
        for rank in (0, 1)
    ]


def test_replay_and_its_end() -> None:
    """A replay repeats batches byte for byte, with their topic, up to a marker without either."""
    *batches, end = [[bytes.fromhex(frame) for frame in reply] for reply in BYTES["replay_hex"]]
    assert end == [b"", b"", END_OF_REPLAY, b""]
    assert [[b"", *frames(BYTES, name)] for name in ("aligned", "stored_twice")] == batches
    assert {len(end)} <= set(REPLAY_FRAMES)


def test_replay_of_what_is_not_yet() -> None:
    """A replay from beyond the last batch is the end marker alone."""
    assert [["", "", END_OF_REPLAY.hex(), ""]] == BYTES["replay_beyond_the_end_hex"]
