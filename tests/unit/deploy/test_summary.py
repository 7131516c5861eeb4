"""The demo's figures follow from the records, and what must not happen is told."""

from dataclasses import replace

import pytest

from deploy.demo.audit import Audit
from deploy.demo.summary import PolicyResult, failures, in_simulated_time, result, served
from loadgen.records import RequestRecord

RECORD = RequestRecord(
    request_id="r-1",
    row_index=0,
    scheduled_s=1.0,
    sent_s=1.0,
    sent_unix_s=5001.0,
    first_token_s=1.5,
    token_times_s=(1.5, 1.75, 2.0),
    finished_s=2.0,
    status=200,
    prompt_tokens=100,
    output_tokens=3,
    cached_tokens=48,
    instance="a",
    decision={
        "instance": "a",
        "hit_tokens": 32,
        "in_flight_tokens": 0,
        "decided_s": 5001.01,
        "degraded": False,
    },
)
FAILED = replace(RECORD, error="http 503: no instance", status=503)
AUDIT = Audit(requests=1, exact=0, unexplained=())


def make_result(*records: RequestRecord) -> PolicyResult:
    """Figures of a run with these records."""
    return result(records, audit=AUDIT, busy_s=(3.0, 1.0), router_added_s=(0.002,))


def test_times_are_stretched_to_the_engines_clock() -> None:
    """At four times the speed a real half second is two simulated ones."""
    record = in_simulated_time(RECORD, 4.0)
    assert make_result(record).ttft_mean_s == pytest.approx(2.0)


def test_tpot_is_a_mean_per_request_after_the_first_token() -> None:
    """Three tokens have two gaps."""
    assert make_result(RECORD).tpot_mean_s == pytest.approx(0.25)


def test_hit_ratios_are_sums_over_sums() -> None:
    """A long prompt weighs more than a short one."""
    long = replace(RECORD, prompt_tokens=300, cached_tokens=0)
    figures = make_result(RECORD, long)
    assert (figures.hit_ratio_actual, figures.hit_ratio_predicted) == (48 / 400, 64 / 400)


def test_a_failed_request_counts_as_an_error_and_nothing_else() -> None:
    """Latencies and hits are those of whole answers."""
    expected = replace(make_result(RECORD), requests=2, errors=1)
    assert expected == make_result(RECORD, FAILED)


def test_imbalance_is_the_largest_over_the_mean_busy_time() -> None:
    """3 s and 1 s of work: 3 / 2."""
    assert make_result(RECORD).imbalance == pytest.approx(1.5)


def test_a_run_without_any_answer_still_has_figures() -> None:
    """All requests failed: zeros, no division."""
    figures = make_result(FAILED)
    assert (figures.errors, figures.ttft_mean_s, figures.hit_ratio_actual) == (1, 0.0, 0.0)


def test_the_first_token_is_dated_on_the_wall_clock() -> None:
    """The audit compares it with the times in journals."""
    request = served(RECORD, prompt=range(100))
    assert request is not None
    assert request.first_token_s == pytest.approx(5001.5)


@pytest.mark.parametrize(
    "change", [{"error": "timeout"}, {"decision": None}, {"cached_tokens": None}]
)
def test_only_answers_that_tell_both_sides_are_judged(change: dict[str, object]) -> None:
    """Without a prediction or an actual figure there is nothing to compare."""
    assert served(replace(RECORD, **change), prompt=range(100)) is None


def test_a_decision_without_the_index_is_not_judged() -> None:
    """It predicts nothing, so nothing was predicted wrongly."""
    assert RECORD.decision is not None
    alone = replace(RECORD, decision=RECORD.decision | {"degraded": True})
    assert served(alone, prompt=range(100)) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"errors": 2}, ["2 of 1 requests failed"]),
        ({"mismatch_unexplained_share": 0.006}, ["0.60%"]),
        ({"mismatch_unexplained_share": 0.005}, []),
    ],
)
def test_errors_and_unexplained_predictions_fail_a_run(
    change: dict[str, float], told: list[str]
) -> None:
    """Half a percent of unexplained mispredictions is the most that passes."""
    found = failures({"lmetric": replace(make_result(RECORD), **change)})
    assert [True] * len(told) == [part in line for part, line in zip(told, found, strict=True)]
