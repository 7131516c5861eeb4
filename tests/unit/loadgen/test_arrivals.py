"""Open-loop schedules."""

import numpy as np
import pytest

from loadgen.arrivals import constant, poisson, rate, replay
from loadgen.errors import SliceError


def test_replay_starts_at_zero_and_keeps_gaps() -> None:
    """Without a rate only the origin moves."""
    assert replay([2.0, 3.0, 7.0]) == (0.0, 1.0, 5.0)


def test_replay_meets_the_rate() -> None:
    """The stretched schedule has the asked rate between first and last."""
    assert pytest.approx(rate(replay([0.0, 1.0, 5.0], request_rate=4.0))) == 4.0


def test_coinciding_arrivals_have_no_rate() -> None:
    """A point cannot be stretched; the message says what can be done."""
    with pytest.raises(SliceError, match="use constant or poisson"):
        replay([3.0, 3.0], request_rate=1.0)


def test_single_and_no_request_are_schedules() -> None:
    """Nothing to stretch is no error."""
    assert (replay([9.0], request_rate=5.0), replay([])) == ((0.0,), ())


def test_constant_has_equal_gaps() -> None:
    """One request every 1 / rate."""
    assert constant(3, request_rate=2.0) == (0.0, 0.5, 1.0)


def test_poisson_has_exponential_gaps_and_repeats() -> None:
    """Mean and standard deviation of the gaps are 1 / rate within 5 %; the seed repeats them."""
    schedule = poisson(5000, request_rate=10.0, seed=3)
    gaps_s = np.diff(schedule)
    assert pytest.approx(gaps_s.mean(), rel=0.05) == 0.1
    assert pytest.approx(gaps_s.std(), rel=0.05) == 0.1
    assert schedule == poisson(5000, request_rate=10.0, seed=3)


def test_rate_of_nothing_is_zero() -> None:
    """No span, no rate."""
    assert (rate(()), rate((0.0,))) == (0.0, 0.0)
