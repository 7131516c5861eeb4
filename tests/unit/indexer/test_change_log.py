"""Which blocks have changed, and since when that is known."""

from indexer.contract.identifiers import BlockHash
from indexer.publishing import change_log
from indexer.publishing.change_log import CHANGES_MAX, ChangeLog

A, B, C = (BlockHash(bytes([i] * 8)) for i in range(3))


def test_changes_are_remembered_by_their_last_time() -> None:
    """A block that changed twice changed last at the later time; the log reaches to its start."""
    log = ChangeLog(1.0)
    log.note(2.0, [A, B])
    log.note(3.0, [B])
    assert log.latest() == {A: 2.0, B: 3.0}
    assert (log.reaches(1.0), log.reaches(1.5)) == (False, True)


def test_the_log_is_bounded_and_says_how_far_it_reaches(monkeypatch) -> None:
    """The oldest entries go; about their time nothing is said any more."""
    monkeypatch.setattr(change_log, "CHANGES_MAX", 3)
    log = ChangeLog(0.0)
    for at_s in range(1, 6):
        log.note(float(at_s), [A, B])
    assert log.latest() == {A: 5.0, B: 5.0}
    assert (log.reaches(4.0), log.reaches(4.5)) == (False, True)
    log.note(6.0, [C] * CHANGES_MAX)  # one entry that is larger than all that may be kept
    assert (log.latest(), log.reaches(6.0)) == ({}, False)
