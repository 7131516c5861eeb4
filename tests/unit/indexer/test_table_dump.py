"""A dump goes on where its table was; what is none is refused."""

from typing import Any

import msgpack
import numpy as np
import pytest

from indexer.contract import block_hash
from indexer.engine.vllm_events import BlockRemoved, BlockStored, Event
from indexer.errors import MalformedCheckpoint
from indexer.table.block_table import BlockTable

SCOPE = {"model_scope": "m", "block_size_tokens": 32}


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> BlockStored:
    """Blocks of 16 tokens."""
    tokens = list(range(16 * len(hashes)))
    return BlockStored(
        hashes=hashes,
        parent=parent,
        tokens=block_hash.pack_tokens(tokens),
        block_size_tokens=16,
        **more,
    )


def full() -> BlockTable:
    """A table with one of everything: halves, holes, copies, groups, marks, blocks that wait."""
    table = BlockTable(**SCOPE)
    events: list[Event] = [
        stored([1, 2, 3, 4]),
        stored([1, 2]),
        stored([1, 2, 3, 4], group=1),
        stored([7], group=2, decides=False),
        stored([b"x", b"y"], parent=4, extra_keys=[(["image", 0],), ()]),
        stored([b"x", b"y"], parent=4, group=1),
        stored([21, 22], parent=20, extra_keys=[(), ("s", b"\1")]),
        stored([5], medium="CPU"),
    ]
    for event in events:
        table.apply(event)
    table.doubt()
    table.credit([*block_hash.split(b"")])
    for event in (stored([31, 32]), stored([31, 32], group=1), stored([33], parent=32)):
        table.apply(event)
    table.apply(stored([33], parent=32, group=1))
    table.trim(0)
    table.apply(stored([34], parent=2))
    table.apply(stored([34], parent=2, group=1))
    table.apply(BlockRemoved(hashes=[3]))
    return table


STORIES: list[Event] = [
    stored([20]),
    stored([20], group=1),
    stored([21], parent=20),
    stored([21], parent=20, group=1),
    stored([b"z"], parent=b"y"),
    stored([b"z"], parent=b"y", group=1),
    stored([3], parent=2),
    BlockRemoved(hashes=[1]),
    BlockRemoved(hashes=[21], group=1),
]
"""What the engine may do next."""


def copied(dump: object) -> Any:
    """As it comes out of a file."""
    return msgpack.unpackb(msgpack.packb(dump), strict_map_key=False)


def test_a_loaded_table_is_the_table_it_was() -> None:
    """It dumps the same columns, publishes the same, and goes on the same way."""
    table = full()
    loaded = BlockTable.load(copied(table.dump()), **SCOPE)
    assert copied(table.dump()) == copied(loaded.dump())
    assert set(table.published()) == set(loaded.published())
    assert table.set_aside_count == loaded.set_aside_count > table.withheld_count > 0
    assert (table.unplaced_count, len(table)) == (loaded.unplaced_count, len(loaded))
    for event in STORIES:
        ours, theirs = table.apply(event), loaded.apply(event)
        assert set(ours.added) == set(theirs.added)
        assert set(ours.removed) == set(theirs.removed)
    assert set(table.readmit(100).added) == set(loaded.readmit(100).added)


def test_credits_are_left_out() -> None:
    """Evidence is not kept: what contradicts it may come while nobody listens."""
    table = full()
    (own,) = block_hash.split(block_hash.step(block_hash.root(**SCOPE), b"\1" * 128))
    assert table.credit([own]).added
    assert own not in BlockTable.load(copied(table.dump()), **SCOPE).published()


@pytest.mark.parametrize("scope", [{"model_scope": "n"}, {"block_size_tokens": 16}])
def test_a_dump_of_another_fleet_is_refused(scope: dict[str, Any]) -> None:
    """Its hashes mean nothing here."""
    with pytest.raises(MalformedCheckpoint, match=next(iter(scope))):
        BlockTable.load(copied(full().dump()), **(SCOPE | scope))


COLUMNS = sorted(BlockTable(**SCOPE).dump())


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [None, "drop", "cut", "swap", "odd", [None], [-1], [[]], {}, 7])
def test_what_is_no_dump_is_refused_or_harmless(column: str, value: object) -> None:
    """Any column missing, short, out of order or of another type: an error, or a table."""
    dump = copied(full().dump())
    match value:
        case "drop":
            del dump[column]
        case "cut" if isinstance(dump[column], list):
            del dump[column][-1:]
        case "swap" if isinstance(dump[column], list):
            dump[column].reverse()
        case "odd" if isinstance(dump[column], list):
            dump[column] = ["odd", *dump[column][1:]]
        case _:
            dump[column] = value
    load_and_use(dump)


def test_a_damaged_dump_is_refused_or_harmless() -> None:
    """Some bytes changed or copied elsewhere: a typed refusal or a usable table."""
    good, refused_count = msgpack.packb(full().dump()), 0
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        packed = bytearray(good)
        for _ in range(1 + int(rng.integers(3))):
            at, other = (int(n) for n in rng.integers(len(packed), size=2))
            packed[at : at + 4] = packed[other : other + 4] if rng.integers(2) else rng.bytes(4)
        try:
            dump = msgpack.unpackb(bytes(packed), strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            continue
        refused_count += not load_and_use(dump)
    assert refused_count > 0


def load_and_use(dump: object) -> bool:
    """Load it and do all that can be done with a table; False when it is refused."""
    try:
        table = BlockTable.load(dump, **SCOPE)
    except MalformedCheckpoint:
        return False
    for event in STORIES:
        table.apply(event)
    table.trim(2)
    table.readmit(9)
    table.credit(table.published())
    table.dump()
    table.doubt()
    table.apply(stored([1, 2, 3, 4]))
    table.apply(BlockRemoved(hashes=[1, 2, 3, 4, 21, 22, 31, 32, 33, 34, b"x", b"y"]))
    return True


@pytest.mark.parametrize("dump", [None, [], {}, {"version": 2}, b"x"])
def test_no_dump_at_all(dump: object) -> None:
    """The error names what it should have been."""
    with pytest.raises(MalformedCheckpoint, match="version"):
        BlockTable.load(dump, **SCOPE)


def test_blocks_that_are_their_own_ancestors_are_refused() -> None:
    """Following them would never end."""
    dump = copied(full().dump())
    first, second = dump["names"][:2]
    dump["parents"][:2] = [second, first]
    with pytest.raises(MalformedCheckpoint):
        BlockTable.load(dump, **SCOPE)
