"""What was when: changes, marks, another clock."""

import math

from indexer.contract.identifiers import BlockHash
from indexer.proof import recollection
from indexer.proof.recollection import CHANGES_MAX, ChangeLog, Marks, RemoteClock

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
    monkeypatch.setattr(recollection, "CHANGES_MAX", 3)
    log = ChangeLog(0.0)
    for at_s in range(1, 6):
        log.note(float(at_s), [A, B])
    assert log.latest() == {A: 5.0, B: 5.0}
    assert (log.reaches(4.0), log.reaches(4.5)) == (False, True)
    log.note(6.0, [C] * CHANGES_MAX)  # one entry that is larger than all that may be kept
    assert (log.latest(), log.reaches(6.0)) == ({}, False)


def test_a_mark_is_never_newer_than_its_moment() -> None:
    """Evidence of a moment may rely on what was known before it, not on what came after."""
    marks = Marks()
    assert marks.at(1.0) is None
    marks.note(1.0, 10)
    marks.note(2.0, 20)
    assert [marks.at(at_s) for at_s in (0.5, 1.0, 1.9, 2.0, 9.0)] == [None, 10, 10, 20, 20]
    marks.clear()
    assert marks.at(9.0) is None


def test_the_quickest_answer_tells_the_clock() -> None:
    """The moment returned is never later than the true one, by however much an answer lagged."""
    clock = RemoteClock()
    assert clock.earliest_local_s(5.0) == -math.inf
    offset_s = 1000.0
    clock.observe(10.0, 12.0, 11.9 + offset_s)  # slow on its way there
    assert clock.earliest_local_s(20.0 + offset_s) <= 20.0
    clock.observe(13.0, 13.02, 13.01 + offset_s)
    assert 19.97 <= clock.earliest_local_s(20.0 + offset_s) <= 20.0
    clock.clear()
    assert clock.earliest_local_s(5.0) == -math.inf
