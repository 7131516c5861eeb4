"""After a loss of history a block is published only once the engine has shown that it is there."""

from table_events import chain, remove, store

from indexer.engine.vllm_events import BlockStored
from indexer.table.block_table import BlockTable


def doubted(*stores: BlockStored) -> BlockTable:
    """A table that was given these before history was lost."""
    table = BlockTable(model_scope="m", block_size_tokens=16)
    for event in stores:
        table.apply(event)
    table.doubt()
    return table


def test_doubt_takes_everything_back_and_forgets_nothing() -> None:
    """Children first; the blocks stay known."""
    table = BlockTable(model_scope="m", block_size_tokens=16)
    table.apply(store([1, 2, 3]))
    assert chain()[2::-1] == table.doubt().removed
    assert (table.published_count, len(table), table.set_aside_count) == (0, 3, 3)


def test_a_store_confirms_its_block_and_all_before_it() -> None:
    """What was stored behind it stays in doubt."""
    table = doubted(store([1, 2, 3, 4]))
    assert chain()[:3] == table.apply(store([3], 2, parent=2)).added
    assert (table.set_aside_count, table.confirmed_count) == (1, 3)


def test_a_parent_is_confirmed_by_what_is_stored_behind_it() -> None:
    """The request that stores a block holds every block before it."""
    table = doubted(store([1, 2, 3]))
    assert chain() == table.apply(store([4], 3, parent=3)).added
    assert table.set_aside_count == 0


def test_what_waited_below_a_confirmed_block_is_published_with_it() -> None:
    """A block stored behind a removed one is not in doubt: it comes with the one before it."""
    table = doubted(store([1]))
    table.apply(store([3], 2, parent=2))
    assert chain()[:3] == table.apply(store([2], 1, parent=1)).added


def test_one_removal_ends_a_doubted_block_however_often_it_was_stored() -> None:
    """The other copies' removals may have been lost."""
    table = doubted(store([1]), store([1]))
    table.apply(store([2], 1, parent=1))
    table.apply(remove(2))
    assert chain()[:1] == table.apply(remove(1)).removed


def test_a_store_of_a_doubted_block_is_its_first_provable_copy() -> None:
    """The copy from before may be gone: one removal ends the block."""
    table = doubted(store([1]))
    table.apply(store([1]))
    assert chain()[:1] == table.apply(remove(1)).removed


def test_a_removal_of_a_doubted_block_forgets_it() -> None:
    """Nothing was published, so nothing is taken back."""
    table = doubted(store([1, 2]))
    assert not table.apply(remove(2)).removed
    assert (len(table), table.set_aside_count) == (1, 1)


def test_every_group_is_proven_by_its_own_events() -> None:
    """A store in one group says nothing of the copies that another one counts."""
    table = doubted(store([1]), store([1], group=1), store([1], group=1))
    assert not table.apply(store([1])).added
    assert chain()[:1] == table.apply(store([1], group=1)).added
    assert chain()[:1] == table.apply(remove(1, group=1)).removed


def test_waiting_blocks_keep_waiting_in_doubt() -> None:
    """When their beginning comes, only what is confirmed is published."""
    table = doubted(store([3, 4], 2, parent=2))
    assert (table.unplaced_count, table.published_count) == (2, 0)
    assert chain()[:2] == table.apply(store([1, 2])).added
    assert chain()[2:3] == table.apply(store([3], 2, parent=2)).added
    assert chain()[3:] == table.apply(store([4], 3, parent=3)).added


def test_all_that_is_still_used_comes_back() -> None:
    """After every chain was used once nothing is in doubt any more."""
    table = doubted(store([1, 2, 3]), store([9], parent=1, first=1))
    table.apply(store([4], 3, parent=3))
    table.apply(store([10], 2, parent=9))
    assert (table.set_aside_count, table.confirmed_count + 1) == (0, 5)


def test_copies_of_every_group_are_as_doubtful() -> None:
    """One removal in a further group ends a block that was stored there twice, too."""
    table = doubted(store([1]), store([1], group=1), store([1], group=1))
    for group in (0, 1):
        table.apply(store([2], 1, parent=1, group=group))
        table.apply(remove(2, group=group))
    assert chain()[:1] == table.published()
    assert chain()[:1] == table.apply(remove(1, group=1)).removed
