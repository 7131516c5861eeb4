"""A bound on what is published withholds whole chains and loses nothing."""

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import BlockRemoved, BlockStored
from indexer.table.block_table import BlockTable


def stored(first: int, count: int, parent: int | None = None) -> BlockStored:
    """Blocks of 16 tokens, numbered from `first` on, filled with their numbers."""
    names = range(first, first + count)
    tokens = [name for name in names for _ in range(16)]
    return BlockStored(
        hashes=list(names),
        parent=parent,
        tokens=block_hash.pack_tokens(tokens),
        block_size_tokens=16,
    )


def chains(*firsts: int, count: int = 4) -> BlockTable:
    """A table of separate chains of this many blocks."""
    table = BlockTable(model_scope="m", block_size_tokens=16)
    for first in firsts:
        table.apply(stored(first, count))
    return table


def test_the_oldest_chain_goes_first_tail_first() -> None:
    """And as a whole, before the next one."""
    table = chains(10, 20, 30, 40)
    order = table.published()
    removed = table.trim(11).removed
    assert [*order[3::-1], *order[7:5:-1]] == removed
    assert (table.published_count, table.withheld_count) == (10, 6)


def test_a_store_behind_it_makes_a_chain_young() -> None:
    """So does a second store of its blocks."""
    table = chains(10, 20, 30)
    table.apply(stored(14, 1, parent=13))
    table.apply(stored(20, 4))
    order = table.published()
    assert set(order[8:12]) == set(table.trim(10).removed)


def test_a_bound_that_is_kept_costs_nothing() -> None:
    """Neither does one that is just reached."""
    table = chains(10)
    assert not table.trim(4).removed
    assert table.trimmed_count == 0


def test_a_common_beginning_stays_for_the_chain_that_is_left() -> None:
    """Only what nothing published stands behind is withheld."""
    table = chains(10)
    table.apply(stored(20, 3, parent=11))
    table.apply(stored(30, 3, parent=11))
    order = table.published()
    table.trim(5)
    assert {*order[:2], *order[7:]} == set(table.published())


def test_counts_are_kept_so_it_comes_back_exactly() -> None:
    """A block stored twice and withheld is ended by its second removal."""
    table = chains(10, count=1)
    table.apply(stored(10, 1))
    (own,) = table.published()
    table.trim(0)
    table.apply(BlockRemoved(hashes=[10]))
    assert [own] == table.readmit(8).added
    assert [own] == table.apply(BlockRemoved(hashes=[10])).removed


def test_a_store_adds_to_the_exact_count() -> None:
    """And publishes the block again, with all before it."""
    table = chains(10, count=2)
    table.trim(0)
    assert len(table.apply(stored(11, 1, parent=10)).added) == 2
    table.apply(BlockRemoved(hashes=[11]))
    assert table.published_count == 2


def test_readmission_begins_with_what_was_withheld_last() -> None:
    """Parents first, up to seven eighths of the bound."""
    table = chains(10, 20)
    order = table.published()
    table.trim(0)
    assert order[4:] == table.readmit(5).added[:4]
    assert table.published_count == 5 - 5 // 8
    assert set(order) == {*table.published(), *table.readmit(100).added}
    assert table.withheld_count == 0


def test_removed_while_withheld_is_not_readmitted() -> None:
    """A hole under a withheld chain keeps the rest of it back."""
    table = chains(10)
    table.trim(0)
    table.apply(BlockRemoved(hashes=[11]))
    assert len(table.readmit(100).added) == 1


def test_doubt_of_withheld_blocks() -> None:
    """What may be gone is not readmitted."""
    table = chains(10)
    table.trim(0)
    table.doubt()
    assert not table.readmit(100).added
    assert (table.set_aside_count, table.withheld_count) == (4, 0)


def test_what_is_withheld_is_stored_nonetheless() -> None:
    """Blocks the engine has without being published count; removed and doubted ones do not."""
    table = chains(10, 20)
    order = table.published()
    table.trim(3)
    assert table.stored([*order, BlockHash(b"nobody's")]) == order
    table.apply(BlockRemoved(hashes=[13]))
    assert table.stored(order) == [*order[:3], *order[4:]]
    table.doubt()
    assert table.stored(order) == []
