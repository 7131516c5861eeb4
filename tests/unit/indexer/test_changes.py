"""Merging of block changes (that the index stays closed: tests/property/test_block_table.py)."""

from indexer.contract.identifiers import BlockHash
from indexer.table.changes import Changes, Delta, PendingChanges, Unseen

A, B, C = (BlockHash(name * 8) for name in (b"a", b"b", b"c"))


def merged(*deltas: Delta) -> PendingChanges:
    """Pending changes of these deltas, in this order."""
    pending = PendingChanges()
    for delta in deltas:
        pending.merge(delta)
    return pending


def test_added_and_removed_meanwhile_cancels_out() -> None:
    """Nothing is written for a block that came and went."""
    assert merged(Delta(added=[A, B]), Delta(removed=[B, A])).take(9) is None


def test_removed_and_added_meanwhile_cancels_out() -> None:
    """Nothing is written for a block that went and came."""
    assert merged(Delta(removed=[B]), Delta(added=[B])).take(9) is None


def test_what_cancels_out_is_told() -> None:
    """Nobody can see it in the index, whichever way round it was; what is new is not among it."""
    pending = merged(Delta(removed=[A]), Delta(added=[B]))
    assert Unseen(came_back=[A], came_and_went=[B]) == pending.merge(
        Delta(removed=[C, B], added=[A])
    )


def test_what_a_write_that_was_put_back_cancels_out_is_told() -> None:
    """Whether the index ever saw it is not known; the engine had it otherwise meanwhile."""
    pending = merged(Delta(added=[A]), Delta(removed=[B]))
    unseen = pending.put_back(Changes(removed=[A], added=[B, C]))
    assert Unseen(came_back=[A], came_and_went=[B]) == unseen


def test_removals_are_taken_first() -> None:
    """A bounded write takes removals, then additions; engine time only with the last of them."""
    pending = merged(Delta(removed=[A]), Delta(added=[B, C]))
    pending.cover(5.0)
    assert Changes(removed=[A], added=[B], oldest_ts_s=5.0) == pending.take(2)
    assert Changes(removed=[], added=[C], engine_ts_s=5.0, oldest_ts_s=5.0) == pending.take(2)
    assert pending.take(2) is None


def test_lag_counts_from_the_oldest_batch() -> None:
    """Of several batches merged, the oldest has waited longest."""
    pending = merged(Delta(added=[A]))
    pending.cover(1.0)
    pending.merge(Delta(added=[B]))
    pending.cover(2.0)
    assert Changes(removed=[], added=[A, B], engine_ts_s=2.0, oldest_ts_s=1.0) == pending.take(9)


def test_a_batch_without_changes_does_not_wait() -> None:
    """It leaves no time behind for the next write."""
    pending = PendingChanges()
    pending.cover(1.0)
    pending.merge(Delta(added=[A]))
    pending.cover(2.0)
    assert Changes(removed=[], added=[A], engine_ts_s=2.0, oldest_ts_s=2.0) == pending.take(9)


def test_replace_forgets_what_was_pending() -> None:
    """After a loss only the whole table counts."""
    pending = merged(Delta(removed=[A]), Delta(added=[B]))
    pending.replace([C])
    assert Changes(removed=[], added=[C]) == pending.take(9)
