"""When Redis is no longer asked, and when it is again."""

from router.index.breaker import FAILURES_MAX, PROBES_MAX, RELAPSE_S, Breaker


def fail(breaker: Breaker, now_s: float, *, broken: bool = False) -> bool:
    """A call that began just now fails."""
    return breaker.failed(now_s, now_s, "why", broken=broken)


def test_late_answers_among_good_ones_do_not_open_it() -> None:
    """Nor do two in a row, whatever time lies between them."""
    breaker = Breaker(silence_s=0.5)
    for _ in range(10):
        for number in range(FAILURES_MAX - 1):
            assert not fail(breaker, 10.0 * number)
        breaker.succeeded()


def test_one_stall_does_not_open_it_however_many_wait() -> None:
    """Calls that failed in the same moment say it once; a lasting silence opens it."""
    breaker = Breaker(silence_s=0.5)
    assert not any(breaker.failed(1.0, 1.25, "why", broken=False) for _ in range(100))
    assert breaker.failed(1.2, 1.5, "why", broken=False)
    assert (breaker.is_open, breaker.reason) == (True, "why")


def test_a_broken_connection_opens_it_at_once() -> None:
    """Two more calls would tell nothing."""
    assert fail(Breaker(silence_s=0.5), 1.0, broken=True)


def test_only_a_probe_closes_it() -> None:
    """A call that was on its way when it opened is older than what opened it."""
    breaker = Breaker(silence_s=0.5)
    fail(breaker, 1.0, broken=True)
    breaker.succeeded()
    assert not breaker.probed(1.1, answered=False)
    assert breaker.is_open
    assert breaker.probed(1.2, answered=True)
    assert not breaker.is_open


def test_what_began_before_the_end_of_an_outage_does_not_open_it_again() -> None:
    """Calls that waited through the outage say nothing of the time after it."""
    breaker = Breaker(silence_s=0.5)
    fail(breaker, 1.0, broken=True)
    breaker.probed(2.0, answered=True)
    assert not breaker.failed(1.9, 2.1, "late", broken=True)
    assert breaker.failed(2.1, 2.1, "again", broken=True)


def test_relapses_take_more_and_more_probes_in_a_row_and_calm_forgets_them() -> None:
    """A Redis that answers now and then is not believed each time; the number is bounded."""
    breaker, now_s, taken = Breaker(silence_s=0.5), 100.0, []
    for pause_s in (0.0, 1.0, 1.0, 1.0, 2 * RELAPSE_S):
        now_s += pause_s
        fail(breaker, now_s, broken=True)
        breaker.probed(now_s, answered=True)
        breaker.probed(now_s, answered=False)  # it begins anew, if it was not enough
        count = 0
        while breaker.is_open:
            breaker.probed(now_s, answered=True)
            count += 1
        taken.append(count)
    assert taken == [0, 2, PROBES_MAX, PROBES_MAX, 0]
