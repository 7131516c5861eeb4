"""Definitions of the figures, on records small enough to check by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from loadgen.metrics import (
    Distribution,
    Slo,
    e2e_s,
    figures,
    in_flight_steps,
    rolling_hit_ratio,
    tpot_s,
    ttft_s,
)
from loadgen.records import RequestRecord

MakeRecord = Callable[..., RequestRecord]


def test_times_of_a_request(make_record: MakeRecord) -> None:
    """TTFT from sending, TPOT over the tokens after the first, E2E to the last token."""
    record = make_record()
    assert pytest.approx(ttft_s(record)) == 0.5
    assert pytest.approx(tpot_s(record)) == 0.1
    assert pytest.approx(e2e_s(record)) == 0.7


def test_tpot_counts_tokens_not_events(make_record: MakeRecord) -> None:
    """A server that packs tokens into events has its tokens counted by the usage."""
    assert pytest.approx(tpot_s(make_record(output_tokens=5))) == 0.2 / 4


def test_one_token_has_no_tpot(make_record: MakeRecord) -> None:
    """Undefined, not zero."""
    assert tpot_s(make_record(output_tokens=1, token_times_s=(1.5,))) is None


@pytest.mark.parametrize("time", [ttft_s, tpot_s, e2e_s])
def test_failed_request_has_no_times(
    make_record: MakeRecord, time: Callable[[RequestRecord], float | None]
) -> None:
    """An answer that broke off would look fast."""
    assert time(make_record(error="disconnected: x")) is None


def test_hit_ratio_is_sum_over_sum_of_those_that_tell(make_record: MakeRecord) -> None:
    """A request without cached tokens is left out of both sums."""
    records = [
        make_record(prompt_tokens=100, cached_tokens=80),
        make_record(prompt_tokens=300, cached_tokens=0),
        make_record(prompt_tokens=999, cached_tokens=None),
    ]
    assert figures(records).hit_ratio_actual == 0.2


def test_prediction_is_compared_with_what_the_engine_told(make_record: MakeRecord) -> None:
    """Predicted ratio, and the share predicted exactly."""
    records = [
        make_record(prompt_tokens=100, cached_tokens=80, decision={"hit_tokens": 80}),
        make_record(prompt_tokens=100, cached_tokens=0, decision={"hit_tokens": 16}),
        make_record(prompt_tokens=100, cached_tokens=0, decision=None),
    ]
    result = figures(records)
    assert (result.hit_ratio_predicted, result.predicted_exactly_ratio) == (0.48, 0.5)


def test_nothing_told_is_none_not_zero(make_record: MakeRecord) -> None:
    """A bare engine without cached tokens has no hit ratio."""
    result = figures([make_record(cached_tokens=None, instance=None)])
    assert (
        result.hit_ratio_actual,
        result.hit_ratio_predicted,
        result.predicted_exactly_ratio,
        result.in_flight_imbalance,
    ) == (None, None, None, None)


def test_rates_and_errors(make_record: MakeRecord) -> None:
    """Offered from the schedule, sent from the sends, both between first and last."""
    records = [
        make_record(scheduled_s=0.0, sent_s=0.0, finished_s=1.0),
        make_record(scheduled_s=1.0, sent_s=2.0, finished_s=4.0, error="timeout: x"),
    ]
    result = figures(records)
    assert (result.requests_count, result.errors_count, result.duration_s) == (2, 1, 4.0)
    assert (result.offered_rate, result.sent_rate) == (1.0, 0.5)
    assert result.output_tokens_rate == 3 / 4.0


@pytest.mark.parametrize(("lag_s", "kept_up"), [(0.049, True), (0.051, False)])
def test_late_generator_is_marked(make_record: MakeRecord, lag_s: float, kept_up: bool) -> None:
    """Beyond 50 ms at P99 the load was not the one asked for."""
    assert kept_up == figures([make_record(scheduled_s=1.0 - lag_s)]).kept_up


def test_goodput_counts_those_that_meet_every_bound(make_record: MakeRecord) -> None:
    """TTFT bound grows with the prompt; a slow TPOT or an error disqualifies."""
    slo = Slo(ttft_s=0.4, ttft_per_1000_prompt_tokens_s=0.1, tpot_s=0.11)
    records = [
        make_record(prompt_tokens=1000),  # 0.5 s allowed, 0.5 s taken
        make_record(prompt_tokens=900),
        make_record(token_times_s=(1.5, 1.6, 1.8)),
        make_record(error="http 503: x"),
    ]
    result = figures(records, slo)
    assert (result.slo_ratio, pytest.approx(result.goodput)) == (0.25, 1 / 0.8)


def test_inter_token_latency_is_a_distribution_of_gaps(make_record: MakeRecord) -> None:
    """A stutter shows in its tail and hardly in TPOT."""
    result = figures([make_record(token_times_s=(1.0, 1.1, 1.2, 2.2), output_tokens=4)])
    assert result.itl_s is not None
    assert (pytest.approx(result.itl_s.mean), pytest.approx(result.itl_s.p50)) == (0.4, 0.1)
    assert result.itl_s.p99 > 0.95


def test_no_records_have_figures() -> None:
    """An interrupted run may have none."""
    result = figures([])
    assert (
        result.requests_count,
        result.offered_rate,
        result.ttft_s,
        result.kept_up,
    ) == (0, 0.0, None, False)


def test_distribution_of_nothing_is_none() -> None:
    """No zero that could be mistaken for a fast one."""
    assert Distribution.of([]) is None


def test_in_flight_steps_per_instance(make_record: MakeRecord) -> None:
    """+1 at sending, -1 at the end; an end and a send at one moment do not add up."""
    records = [
        make_record(instance="b", sent_s=0.0, finished_s=2.0),
        make_record(instance="a", sent_s=0.0, finished_s=1.0),
        make_record(instance="a", sent_s=1.0, finished_s=3.0),
        make_record(instance=None, sent_s=0.0, finished_s=9.0),
    ]
    steps = in_flight_steps(records)
    assert list(steps) == ["a", "b"]
    moments_s, counts = steps["a"]
    assert moments_s.tolist() == [0.0, 1.0, 1.0, 3.0]
    assert counts.tolist() == [1, 0, 1, 0]


def test_imbalance_is_largest_over_mean(make_record: MakeRecord) -> None:
    """Request-seconds 3 and 1: 3 over a mean of 2."""
    records = [
        make_record(instance="a", sent_s=0.0, finished_s=3.0),
        make_record(instance="b", sent_s=0.0, finished_s=1.0),
    ]
    assert figures(records).in_flight_imbalance == 1.5


def test_rolling_hit_ratio_forgets_what_left_the_window(make_record: MakeRecord) -> None:
    """Tokens of the last second only, weighted by tokens."""
    records = [
        make_record(first_token_s=at, prompt_tokens=100, cached_tokens=cached)
        for at, cached in ((0.0, 0), (0.5, 100), (2.0, 50))
    ]
    moments_s, ratios = rolling_hit_ratio(records, window_s=1.0)
    assert moments_s.tolist() == [0.0, 0.5, 2.0]
    assert np.allclose([0.0, 0.5, 0.5], ratios)
