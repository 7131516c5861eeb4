"""What was when: marks, another clock."""

import math

from indexer.notices.recollection import Marks, RemoteClock


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
