"""What is sent when: by timestamp or in closed loop, and at another rate."""

from collections.abc import Callable

import pytest

from loadgen.errors import WorkloadError
from loadgen.trace import TraceRow
from loadgen.workloads.pacing import AnswerTime, Pacer, Step, plan, rescale

MakeRow = Callable[..., TraceRow]
ANSWER = AnswerTime(ttft_s=1.0, tpot_s=0.5)


def test_by_timestamp_nobody_waits(make_row: MakeRow) -> None:
    """Arrivals are all that counts."""
    rows = [
        make_row(1, arrival_s=2.0, session_id="a"),
        make_row(1, 2, arrival_s=5.0, session_id="a"),
    ]
    assert (Step(parent=None, after_s=2.0), Step(parent=None, after_s=5.0)) == plan(
        rows, "timestamps"
    )


def test_think_time_is_stated_or_the_gap_less_the_answer(make_row: MakeRow) -> None:
    """An answer of 3 tokens takes 1 + 2 x 0.5 s; a gap shorter than that leaves no think time."""
    rows = [
        make_row(1, arrival_s=0.0, session_id="a", output_tokens=3),
        make_row(1, 2, arrival_s=5.0, session_id="a", output_tokens=3),
        make_row(1, 2, 3, arrival_s=6.0, session_id="a", output_tokens=3),
        make_row(1, 2, 3, arrival_s=60.0, session_id="a", think_s=4.0),
    ]
    steps = plan(rows, "closed_loop", answer_time=ANSWER)
    assert [(s.parent, s.after_s) for s in steps] == [(None, 0.0), (0, 3.0), (1, 0.0), (2, 4.0)]


def test_a_named_parent_goes_before_the_row_before(make_row: MakeRow) -> None:
    """Two rows that continue the same answer branch; a parent outside the rows is none."""
    rows = [
        make_row(1, arrival_s=0.0, session_id="a", request_id="r0"),
        make_row(1, 2, arrival_s=1.0, session_id="a", request_id="r1", parent_id="r0"),
        make_row(1, 3, arrival_s=2.0, session_id="a", request_id="r2", parent_id="r0"),
        make_row(9, arrival_s=3.0, session_id="b", request_id="r3", parent_id="gone"),
    ]
    assert [step.parent for step in plan(rows, "closed_loop")] == [None, 0, 0, None]


def test_follow_up_is_due_a_think_time_after_its_parents_answer() -> None:
    """Before the answer it has no time at all; after it, answer plus think time."""
    pacer = Pacer((Step(parent=None, after_s=1.0), Step(parent=0, after_s=2.5)))
    assert (pacer.take(0.9), pacer.next_due_s) == ([], 1.0)
    assert (pacer.take(1.0), pacer.next_due_s, pacer.left_count) == ([0], None, 1)
    pacer.answered(0, 10.0)
    assert (pacer.take(12.4), pacer.next_due_s) == ([], 12.5)
    assert (pacer.take(12.5), pacer.left_count) == ([1], 0)


def test_rescaling_moves_sessions_and_keeps_what_is_within(make_row: MakeRow) -> None:
    """Three sessions 20 s apart with four requests, at 1 request a second: 0.75 sessions/s."""
    rows = [
        make_row(1, arrival_s=10.0, session_id="a"),
        make_row(1, 2, arrival_s=25.0, session_id="a"),
        make_row(5, arrival_s=30.0, session_id="b"),
        make_row(6, arrival_s=50.0, session_id="c"),
    ]
    moved = rescale(rows, request_rate=1.0)
    assert [(row.session_id, row.arrival_s) for row in moved] == [
        ("a", 0.0),
        ("b", 1.333333),
        ("c", 2.666667),
        ("a", 15.0),
    ]


def test_an_early_answer_does_not_bring_a_turn_forward() -> None:
    """A turn with a time of its own comes then, or when the answer before it has ended."""
    pacer = Pacer(
        [
            Step(parent=None, after_s=0.0),
            Step(parent=0, after_s=0.0, not_before_s=5.0),
            Step(parent=1, after_s=0.0, not_before_s=6.0),
        ]
    )
    assert pacer.take(0.0) == [0]
    pacer.answered(0, 1.0)
    assert pacer.next_due_s == 5.0
    assert pacer.take(5.0) == [1]
    pacer.answered(1, 9.0)
    assert pacer.next_due_s == 9.0


def test_sessions_that_all_begin_at_once_have_no_rate(make_row: MakeRow) -> None:
    """The message names the setting."""
    rows = [make_row(1, session_id="a"), make_row(2, session_id="b")]
    with pytest.raises(WorkloadError, match="request_rate"):
        rescale(rows, request_rate=1.0)
