"""Figures of a run of the lab, against numbers worked out by hand."""

from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest

from loadgen.simulation.lab.figures import (
    AGENT_SLO,
    CHAT_SLO,
    BusySamples,
    Requests,
    RunFigures,
    RunKey,
    Window,
    figures,
)

KEY = RunKey(
    workload="chat",
    load=0.5,
    policy="lmetric",
    instances=2,
    routers=1,
    staleness_s=0.0,
    seed=1,
    variant="tier",
)
REQUESTS = Requests(
    nominal_s=np.array([9.0, 10.0, 12.0, 13.0, 14.0, 20.0]),
    arrived_s=np.array([9.0, 10.0, 12.0, 13.0, 14.0, 20.0]),
    first_token_s=np.array([9.5, 11.0, 15.0, 13.5, nan, 20.1]),
    ended_s=np.array([9.6, 12.0, 15.0, 14.0, nan, 20.2]),
    prompt_tokens=np.array([1.0, 1000.0, 2000.0, 1000.0, 500.0, 1.0]),
    output_tokens=np.array([9.0, 41.0, 1.0, 11.0, 5.0, 9.0]),
    hit_tokens=np.array([1.0, 800.0, 0.0, 200.0, nan, 1.0]),
    slot=np.array([0, 0, 1, 0, -1, 1]),
)
"""Of the window: TTFT 1, 3, 0.5 s; TPOT 25 ms, none, 50 ms; the fourth is lost."""

BUSY = BusySamples(
    at_s=np.array([0.0, 10.0, 15.0, 20.0]),
    busy_s=np.array([[0.0, 0.0], [9.0, 1.0], [12.0, 4.0], [13.0, 9.0]]),
)
WINDOW = Window(from_s=10.0, to_s=20.0)


def measured(requests: Requests = REQUESTS, busy: BusySamples = BUSY, slo=CHAT_SLO) -> RunFigures:
    """Of the window from 10 to 20 s."""
    return figures(KEY, requests, busy, WINDOW, slo=slo, offered_rps=0.4, cpu_s=1.5, virtual_s=30.0)


def test_a_policy_that_makes_follow_ups_late_is_measured_by_the_same_requests() -> None:
    """The one due at 14 came at 25: it counts, and the served ones took until then."""
    late = replace(
        REQUESTS,
        arrived_s=np.array([9.0, 10.0, 12.0, 13.0, 25.0, 20.0]),
        first_token_s=np.array([9.5, 11.0, 15.0, 13.5, 25.5, 20.1]),
        ended_s=np.array([9.6, 12.0, 15.0, 14.0, 25.6, 20.2]),
    )
    late = replace(late, slot=np.where(late.slot < 0, 0, late.slot))
    late = replace(late, hit_tokens=np.nan_to_num(late.hit_tokens))
    found = measured(late)
    assert (found.requests, found.lost) == (4, 0)
    assert found.prompt_tokens_per_s == pytest.approx(4500 / 15)


def test_times_are_of_requests_that_arrived_in_the_window_and_were_served() -> None:
    """Arrival at its start counts, at its end does not; one token has no TPOT; lost has nothing."""
    found = measured()
    assert (found.requests, found.lost) == (4, 1)
    assert found.ttft_mean_s == pytest.approx(1.5)
    assert found.ttft_p50_s == pytest.approx(1.0)
    assert found.ttft_p95_s == pytest.approx(2.8)
    assert found.ttft_p99_s == pytest.approx(2.96)
    assert found.tpot_mean_s == pytest.approx(0.0375)
    assert found.tpot_p99_s == pytest.approx(0.04975)
    assert found.ttft_quantiles_s[0] == pytest.approx(0.5)
    assert found.ttft_quantiles_s[50] == pytest.approx(1.0)
    assert found.ttft_quantiles_s[75] == pytest.approx(2.0)
    assert found.ttft_quantiles_s[100] == pytest.approx(3.0)
    assert len(found.ttft_quantiles_s) == len(found.tpot_quantiles_s) == 101


def test_goodput_counts_requests_that_meet_both_bounds_a_second_of_the_window() -> None:
    """TTFT 1 s within 1.0625 s, and 50 ms within 50 ms; 3 s is beyond 1.125 s."""
    found = measured()
    assert found.goodput_rps == pytest.approx(0.2)
    assert found.slo_ratio == pytest.approx(0.5)
    assert found.goodput_tokens_per_s == pytest.approx((1041 + 1011) / 10)
    assert found.prompt_tokens_per_s == pytest.approx(400.0)
    assert measured(slo=AGENT_SLO).goodput_rps == 0


def test_what_arrives_and_waits_in_each_half_of_the_window() -> None:
    """Until 17 s three before 13.5, then the lost one; until 14 s one of 1 s, two of 3 and 0.5."""

    def within(to_s: float) -> RunFigures:
        window = Window(from_s=10.0, to_s=to_s)
        return figures(
            KEY, REQUESTS, BUSY, window, slo=CHAT_SLO, offered_rps=0.4, cpu_s=1.5, virtual_s=30.0
        )

    found = within(17.0)
    assert found.arriving_rps == pytest.approx(4 / 7)
    assert found.arriving_drift == pytest.approx(1 / 3)
    assert isnan(found.ttft_drift)
    found = within(14.0)
    assert (found.arriving_rps, found.arriving_drift) == (0.75, 2.0)
    assert found.ttft_drift == pytest.approx((3.0 + 0.5) / 2 / 1.0)


def test_a_bound_met_by_ttft_alone_is_no_goodput() -> None:
    """The agents' 20 ms leave those out whose TPOT is 25 ms, and keep an only token."""
    quick = replace(
        REQUESTS,
        first_token_s=np.array([9.5, 11.0, 13.0, 13.5, nan, 20.1]),
        ended_s=np.array([9.6, 12.0, 13.0, 14.0, nan, 20.2]),
    )
    assert measured(quick).slo_ratio == pytest.approx(0.75)
    assert measured(quick, slo=AGENT_SLO).slo_ratio == pytest.approx(0.25)


def test_hit_ratio_is_a_ratio_of_sums() -> None:
    """1,000 hit tokens of 4,000, not the mean of 80 %, 0 % and 20 %."""
    assert measured().hit_ratio == pytest.approx(0.25)


def test_imbalance_is_of_the_busy_time_within_the_window() -> None:
    """4 and 8 s of it: 8 / 6; over time 3 and 3 s, then 1 and 5 s; before it nothing counts."""
    found = measured()
    assert found.imbalance == pytest.approx(8 / 6)
    assert found.imbalance_over_time == (
        (pytest.approx(2.5), pytest.approx(1.0)),
        (pytest.approx(7.5), pytest.approx(5 / 3)),
    )


def test_imbalance_of_pools_is_that_of_the_worse_one() -> None:
    """One of two prefills 4 s and the others 8 and 2 s decode: 8 / 5, whatever lies between."""
    busy_s = np.array([[0.0, 0.0, 0.0], [4.0, 8.0, 2.0]])
    busy = BusySamples(at_s=np.array([10.0, 20.0]), busy_s=busy_s, prefill_instances=1)
    assert measured(busy=busy).imbalance == pytest.approx(8 / 5)
    assert measured(busy=replace(busy, prefill_instances=0)).imbalance == pytest.approx(12 / 7)


def test_imbalance_over_time_has_sixty_points_at_most() -> None:
    """However often the fleet was sampled; an idle fleet is in balance."""
    at_s = np.linspace(0, 30, 3001)
    found = measured(busy=BusySamples(at_s=at_s, busy_s=np.zeros((3001, 2))))
    assert len(found.imbalance_over_time) == 60
    assert {ratio for _, ratio in found.imbalance_over_time} == {1.0} == {found.imbalance}


def test_a_run_that_served_nobody_has_no_times() -> None:
    """NaN, not zero: nothing is as fast as nothing."""
    none = np.full(6, nan)
    found = measured(replace(REQUESTS, first_token_s=none, ended_s=none, hit_tokens=none))
    assert (found.lost, found.goodput_rps, found.ttft_quantiles_s) == (4, 0.0, ())
    assert isnan(found.ttft_mean_s)
    assert isnan(found.tpot_p99_s)
    assert isnan(found.hit_ratio)


def test_figures_know_which_run_they_are_of() -> None:
    """The key is in them, flat."""
    found = measured()
    assert found.key == KEY
    assert (found.workload, found.variant, found.offered_rps, found.virtual_s, found.cpu_s) == (
        "chat",
        "tier",
        0.4,
        30.0,
        1.5,
    )
