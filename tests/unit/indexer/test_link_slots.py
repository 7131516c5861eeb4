"""Which node of a cluster answers for a key, and how partitions lie on the ring."""

import pytest
from builders import make_fleet_record
from redis.crc import key_slot

from indexer.contract import index_functions, keys
from indexer.contract.link.address import Server
from indexer.contract.link.slots import Shard, SlotMap, slot_of

ASKED = Server("asked", 7)
REPLY = [
    [8192, 16383, [b"b", 2, b"id"], [b"", 4, b"id", []]],
    [0, 8191, [None, 1, b"id", []], [b"?", 5, b"id", []]],
]
FIRST, SECOND = (
    Shard(Server("asked", 1), (Server("asked", 5),)),
    Shard(Server("b", 2), (Server("asked", 4),)),
)


def test_a_map_names_master_and_replicas_of_each_slot() -> None:
    """A node without a host is on the host that was asked."""
    slot_map = SlotMap.of(REPLY, ASKED)
    assert slot_map.shards == (FIRST, SECOND)
    assert [slot_map.shard(slot) for slot in (0, 8191, 8192, 16383)] == [FIRST] * 2 + [SECOND] * 2
    assert slot_map.is_whole


def test_a_map_with_a_hole_says_so() -> None:
    """A slot that nobody serves has no shard."""
    slot_map = SlotMap.of(REPLY[:1], ASKED)
    assert (slot_map.shard(0), slot_map.is_whole) == (None, False)


def test_a_refusal_corrects_one_slot() -> None:
    """The node may be a known master, or one that no map has shown yet."""
    slot_map = SlotMap.of(REPLY, ASKED)
    slot_map.move(5, Server("b", 2))
    slot_map.move(6, Server("c", 3))
    assert [slot_map.shard(slot) for slot in (4, 5, 6)] == [FIRST, SECOND, Shard(Server("c", 3))]


@pytest.mark.parametrize(
    "reply", [b"nonsense", [[0]], [[0, 1, [None]]], [[0, 20000, [b"a", 1]]], ["x"], RuntimeError()]
)
def test_what_is_no_map_is_refused(reply: object) -> None:
    """By an error of its own, whatever came."""
    with pytest.raises(ValueError, match="not a map of slots"):
        SlotMap.of(reply, ASKED)


@pytest.mark.parametrize(
    ("command", "slot"),
    [
        (("GET", "{a}b"), key_slot(b"a")),
        (("FCALL", "f", 1, "{a}b", "x"), key_slot(b"a")),
        (("FCALL_RO", "f", 2, b"{a}b", "{a}c"), key_slot(b"a")),
        (("MEMORY", "USAGE", "{a}b"), key_slot(b"a")),
        (("PING",), None),
        (("TIME",), None),
        (("DBSIZE",), None),
    ],
)
def test_a_command_goes_where_its_first_key_is(command: tuple[object, ...], slot: object) -> None:
    """Function calls have it after their name and the number of keys."""
    assert slot_of(command) == slot


@pytest.mark.parametrize("scope", ["m", "meta-llama/Llama-3.1-70B", "x" * 100])
@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("partitions", [1, 2, 4, 7, 12, 16])
def test_partitions_are_spread_evenly_over_shards(scope: str, shards: int, partitions: int) -> None:
    """Of n partitions each of s shards with equal ranges has n/s, rounded down or up."""
    fleet = make_fleet_record(fleet_id=keys.fleet_id(scope), partitions=partitions)
    counts = [0] * shards
    for partition in range(partitions):
        counts[key_slot(index_functions.anchor(fleet, partition).encode()) * shards // 16384] += 1
    assert set(counts) <= {partitions // shards, -(-partitions // shards)}
