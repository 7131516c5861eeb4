"""Evidence is published as long as no event contradicts it."""

import pytest
from table_events import chain, remove, store

from indexer.engine.vllm_events import AllBlocksCleared, Event
from indexer.table import published_set, recent_removals
from indexer.table.block_table import BlockTable


def table(*events: Event, size: int = 16) -> BlockTable:
    """A table that was given these."""
    new = BlockTable(model_scope="m", block_size_tokens=size)
    for event in events:
        new.apply(event)
    return new


def test_what_is_unknown_is_credited() -> None:
    """Behind what is published by name."""
    t = table(store([1, 2]))
    assert chain()[2:] == t.credit(chain()).added
    assert (t.credits_count, t.credited_count, t.published_count) == (2, 2, 4)


@pytest.mark.parametrize(
    "end", [remove(9), remove(9, group=3), AllBlocksCleared(), remove(7), remove(1)]
)
def test_credits_end_where_what_left_may_be_theirs(end: Event) -> None:
    """An unknown name, a group not seen before, a cleared cache, a block that waits, a parent."""
    t = table(store([1]), store([7], parent=6))
    t.credit(chain())
    assert chain()[:0:-1] == t.apply(end).removed[:3]
    assert t.credits_count == 0


@pytest.mark.parametrize("end", [remove(9, medium="CPU"), remove(9, group=1), remove(5)])
def test_credits_stay_where_what_left_is_not_theirs(end: Event) -> None:
    """Another medium, a group that decides nothing, a known block of other content."""
    t = table(store([1]), store([5], first=3), store([5], group=1, decides=False))
    t.credit(chain())
    t.apply(end)
    assert t.credits_count == 3


def test_doubt_ends_credits() -> None:
    """Whatever left may have been theirs."""
    t = table()
    t.credit(chain())
    assert chain()[::-1] == t.doubt().removed


def test_a_credit_ends_with_a_block_of_its_content() -> None:
    """And with it whatever was credited behind; what is before it stays."""
    t = table()
    t.credit(chain())
    t.apply(store([1, 2, 3]))
    assert chain()[:1:-1] == t.apply(remove(3)).removed
    assert (t.published_count, t.credits_count) == (2, 2)


def test_a_credit_ends_with_the_last_block_that_holds_its_hash() -> None:
    """Also when that is withdrawn only because one before it went."""
    t = table()
    t.credit(chain())
    t.apply(store([1, 2, 3]))
    assert chain()[::-1] == t.apply(remove(1)).removed


def test_a_part_of_a_canonical_block_ends_what_is_made_of_it() -> None:
    """Its second half was never announced."""
    t = table(store([1, 2, 3]), size=32)
    t.credit(chain(size=32))
    assert chain(size=32)[1:] == t.apply(remove(3)).removed
    assert t.published_count == 1


def test_later_evidence_of_a_part() -> None:
    """A removed first half contradicts older evidence of the whole."""
    t = table(store([1, 2, 3]), size=32)
    mark = t.mark
    t.apply(remove(3))
    assert not t.credit(chain(size=32), since=mark).added
    assert chain(size=32)[1:] == t.credit(chain(size=32), since=t.mark).added


def test_evidence_is_cut_where_a_block_left_since() -> None:
    """A block stored, observed, and removed before the notice of it arrives."""
    t = table(store([1, 2, 3]))
    mark = t.mark
    t.apply(remove(3))
    t.apply(remove(2))
    assert not t.credit(chain(), since=mark).added
    assert chain()[1:] == t.credit(chain(), since=t.mark).added


@pytest.mark.parametrize("event", [remove(9), AllBlocksCleared(), None])
def test_evidence_is_void_where_anything_left_since(event: Event | None) -> None:
    """An unknown name, a cleared cache, a loss of history."""
    t = table()
    mark = t.mark
    if event is None:
        t.doubt()
    else:
        t.apply(event)
    assert not t.credit(chain(), since=mark).added


def test_evidence_older_than_what_is_remembered_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which blocks left is remembered for a bounded number of them."""
    monkeypatch.setattr(recent_removals, "RECENT_REMOVALS_MAX", 2)
    t = table(store([1], first=1), store([2], first=2), store([3], first=3))
    mark = t.mark
    t.apply(remove(1))
    assert t.credit(chain()[:1], since=mark).added
    t.apply(remove(2))
    t.apply(remove(3))
    assert not t.credit(chain(), since=mark).added


def test_evidence_confirms_blocks_set_aside() -> None:
    """By name: they do not end with the credits."""
    t = table(store([1, 2, 3]))
    t.doubt()
    assert chain() == t.credit(chain()).added
    assert (t.confirmed_count, t.credits_count) == (3, 1)
    t.apply(remove(9))
    assert chain()[:3] == t.published()


def test_a_store_that_the_evidence_knew_of_is_not_counted_on_top() -> None:
    """It was under way when the evidence came: one removal ends the block."""
    t = table(store([1]))
    t.doubt()
    t.credit(chain()[:1])
    t.apply(store([1]))
    assert chain()[:1] == t.apply(remove(1)).removed


def test_evidence_names_nobody_where_two_may_be_meant() -> None:
    """Two doubted names of one content: the content is credited, whichever leaves ends it."""
    for gone in (1, 2):
        t = table(store([1]), store([2]))
        t.doubt()
        assert chain()[:1] == t.credit(chain()[:1]).added
        assert (t.confirmed_count, t.credits_count) == (0, 1)
        assert chain()[:1] == t.apply(remove(gone)).removed


def test_credits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of the chain is credited."""
    monkeypatch.setattr(published_set, "CREDITS_MAX", 2)
    assert chain()[:2] == table().credit(chain()).added


def test_trim_ends_credits_first() -> None:
    """They are what can be found again."""
    t = table(store([1, 2]))
    t.credit(chain())
    assert chain()[:1:-1] == t.trim(3).removed
    assert t.withheld_count == 0


def test_a_new_deciding_group_leaves_no_credit_behind_what_it_withdraws() -> None:
    """Credits of the same content end with the block."""
    t = table()
    t.credit(chain())
    t.apply(store([1]))
    assert chain()[::-1] == t.apply(store([1], group=1)).removed
