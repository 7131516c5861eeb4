"""What one rank publishes stays within its room."""

import pytest
from prometheus_client import CollectorRegistry

from indexer.approximate.learned_blocks import LearnedBlocks
from indexer.contract import block_hash
from indexer.contract.identifiers import EngineBlockHash, InstanceId
from indexer.engine.vllm_events import DEVICE_MEDIUM, BlockStored
from indexer.publishing import budget
from indexer.publishing.room import Room
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.telemetry import Telemetry


@pytest.fixture
def table() -> BlockTable:
    """Empty."""
    return BlockTable(model_scope="m", block_size_tokens=16)


@pytest.fixture
def room() -> Room:
    """Without a limit."""
    return Room(
        Telemetry(CollectorRegistry()),
        rank="0",
        instance_id=InstanceId("i"),
        canonical_blocks_per_engine_block=1.0,
        learned=LearnedBlocks(100),
    )


def store(table: BlockTable, chain: int, blocks: int = 10) -> Delta:
    """A chain of its own."""
    tokens = [100 * chain + i for i in range(blocks) for _ in range(16)]
    return table.apply(
        BlockStored(
            hashes=[EngineBlockHash(100 * chain + i) for i in range(blocks)],
            parent=None,
            tokens=block_hash.pack_tokens(tokens),
            block_size_tokens=16,
            medium=DEVICE_MEDIUM,
            group=0,
        )
    )


def test_without_a_limit_nothing_is_withheld(table: BlockTable, room: Room) -> None:
    """Whatever comes is published."""
    for chain in range(10):
        store(table, chain)
        assert room.keep(table) == Delta()
    assert room.hear(None, table) == [Delta()]
    assert table.published_count == 100


def test_later_stores_stay_within_the_budget(table: BlockTable, room: Room) -> None:
    """Every batch is followed by what gives way for it, the coldest chains first."""
    room.hear(40, table)
    for chain in range(10):
        added = store(table, chain)
        assert len(added.added) == 10  # the newest is published
        room.keep(table)
        assert table.published_count <= 40
    assert room.wanted_blocks(table) == 100


def test_withheld_blocks_come_back_with_the_room(table: BlockTable, room: Room) -> None:
    """Partly when there is some, wholly when there is enough."""
    for chain in range(10):
        store(table, chain)
    room.hear(40, table)
    assert table.published_count == 35  # an eighth is left for new ones
    room.hear(41, table)
    assert table.published_count == 36
    room.hear(80, table)
    assert table.published_count == 70
    room.hear(100, table)
    assert table.published_count == 100
    room.hear(40, table)
    room.hear(None, table)
    assert (table.published_count, table.withheld_count) == (100, 0)


def test_a_full_server_is_relieved_of_an_eighth(
    table: BlockTable, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gave way comes back only after a while, however large the budget."""
    for chain in range(10):
        store(table, chain)
    assert len(room.found_full(table).removed) == 13
    room.hear(None, table)
    assert table.published_count == 87
    monkeypatch.setattr(budget, "RELAX_S", 0.0)
    room.hear(None, table)
    assert table.published_count == 100


def learned_room(blocks: int) -> tuple[Room, LearnedBlocks]:
    """With one chain of so many learned blocks."""
    learned = LearnedBlocks(100)
    root = block_hash.approximate_root(model_scope="m", block_size_tokens=16)
    learned.learn(block_hash.split(block_hash.chain(root, bytes(64 * blocks), 16)))
    room = Room(
        Telemetry(CollectorRegistry()),
        rank="0",
        instance_id=InstanceId("i"),
        canonical_blocks_per_engine_block=1.0,
        learned=learned,
    )
    return room, learned


def test_what_is_learned_gives_way_before_what_is_known(table: BlockTable) -> None:
    """It counts against the budget, and comes back by being used only."""
    room, learned = learned_room(20)
    store(table, 1)
    assert room.wanted_blocks(table) == 30
    last = learned.published()[-1]
    (delta, *_) = room.hear(25, table)
    assert (len(delta.removed), delta.removed[0]) == (5, last)
    assert (len(learned), table.published_count) == (15, 10)
    room.hear(9, table)
    assert (len(learned), table.published_count) == (0, 8)
    room.hear(None, table)
    assert (len(learned), table.published_count) == (0, 10)


def test_a_full_server_takes_an_eighth_of_what_is_learned_first(table: BlockTable) -> None:
    """And again while it stays full, at growing intervals; the table is spared meanwhile."""
    room, learned = learned_room(70)
    store(table, 1)
    assert len(room.found_full(table).removed) == 10
    assert (len(learned), table.published_count) == (60, 10)
    assert room.found_full(table) == Delta()  # patient
