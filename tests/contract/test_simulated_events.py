"""The simulated engine's events are, byte for byte, what real vLLM 0.32 sends."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from workers.simulated.event_encoding import EventEncoding, encode_batch
from workers.simulated.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.publisher import END_SEQUENCE
from workers.simulated.request import pack_tokens

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vllm_0_32_kv_events.json").read_text())


def engine_event(fields: dict[str, Any]) -> KvEvent:
    """The engine's value for a decoded wire event."""
    if fields["type"] == "BlockRemoved":
        return BlocksRemoved(block_hashes=tuple(fields["block_hashes"]))
    if fields["type"] == "AllBlocksCleared":
        return BlocksCleared()
    first_keys = fields["extra_keys"][0] or [None]
    return BlocksStored(
        block_hashes=tuple(fields["block_hashes"]),
        parent_block_hash=fields["parent_block_hash"],
        packed_tokens=pack_tokens(fields["token_ids"]),
        block_size_tokens=fields["block_size"],
        adapter=fields["lora_name"],
        adapter_id=fields["lora_id"],
        salt=first_keys[-1],
        session_id=fields.get("session_id"),
    )


@pytest.mark.parametrize("sample", GOLDEN["samples"], ids=lambda sample: sample["name"])
def test_map_encoding_reproduces_recorded_payload(sample: dict[str, Any]) -> None:
    """Key order, omitted defaults and integer widths of each recorded payload come out again."""
    payload = bytes.fromhex(sample["frames_hex"][2])
    ts, records, rank = msgpack.unpackb(payload)

    encoded = encode_batch(
        [engine_event(fields) for fields in records],
        ts=ts,
        encoding=EventEncoding.MAP,
        data_parallel_rank=rank,
    )

    assert payload.hex() == encoded.hex()


def test_one_removal_value_is_one_wire_event_per_hash() -> None:
    """Evicting two blocks at once is two BlockRemoved events, as vLLM sends them."""
    both = encode_batch(
        [BlocksRemoved(block_hashes=(7, 1 << 40))], ts=1.0, encoding=EventEncoding.MAP
    )
    single = encode_batch(
        [BlocksRemoved(block_hashes=(7,)), BlocksRemoved(block_hashes=(1 << 40,))],
        ts=1.0,
        encoding=EventEncoding.MAP,
    )
    assert single == both


@pytest.mark.parametrize("sample", GOLDEN["samples"], ids=lambda sample: sample["name"])
def test_array_encoding_holds_the_same_values_in_field_order(sample: dict[str, Any]) -> None:
    """The old encoding is the tag and the field values, without names."""
    ts, records, _ = msgpack.unpackb(bytes.fromhex(sample["frames_hex"][2]))

    encoded = encode_batch(
        [engine_event(fields) for fields in records], ts=ts, encoding=EventEncoding.ARRAY
    )

    assert [list(fields.values()) for fields in records] == msgpack.unpackb(encoded)[1]


def test_adapter_is_an_extra_key_of_every_block_and_salt_of_the_first_only() -> None:
    """Extra keys stand per block in vLLM's order: adapter, then salt."""
    event = BlocksStored(
        block_hashes=(1, 2),
        parent_block_hash=None,
        packed_tokens=pack_tokens(range(8)),
        block_size_tokens=4,
        adapter="poet",
        adapter_id=1,
        salt="s",
    )
    encoded = encode_batch([event], ts=1.0, encoding=EventEncoding.MAP)
    assert msgpack.unpackb(encoded)[1][0]["extra_keys"] == [["poet", "s"], ["poet"]]


def test_end_marker_is_the_recorded_one() -> None:
    """A replay ends with eight 0xFF bytes in the sequence frame."""
    assert bytes.fromhex(GOLDEN["replay_end_marker_frames_hex"][2]) == END_SEQUENCE


def test_lone_surrogates_of_a_client_do_not_break_a_batch() -> None:
    """A session id that UTF-8 cannot carry is replaced, not fatal."""
    event = BlocksStored(
        block_hashes=(1,),
        parent_block_hash=None,
        packed_tokens=pack_tokens([1]),
        block_size_tokens=1,
        session_id="a\udcff",
    )
    encoded = encode_batch([event], ts=1.0, encoding=EventEncoding.MAP)
    assert msgpack.unpackb(encoded)[1][0]["session_id"] == "a?"
