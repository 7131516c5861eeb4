"""The papers' claims against runs of which the verdict is known."""

import pytest
from lab_runs import lab_run

from loadgen.simulation.lab.claims_whys import WHYS
from loadgen.simulation.lab.figures import RunFigures
from loadgen.simulation.lab.report.cells import Matrix
from loadgen.simulation.lab.report.claims import (
    CLAIMS,
    Claim,
    Judged,
    Verdict,
    grade,
    judge,
    verdict,
)
from loadgen.simulation.lab.report.evidence import Shown

REPRODUCED, PARTLY, NOT = Verdict.REPRODUCED, Verdict.PARTLY, Verdict.NOT


def judged(identity: str, runs: list[RunFigures], **options) -> Judged:
    """One claim over these runs; of the workload `agents` as the agents'."""
    found = judge(Matrix.of(runs), agents={"agents"}, **options)
    return next(one for one in found if one.claim.identity == identity)


def half_load(**ttft_mean_s: float) -> list[RunFigures]:
    """One workload at half load, a policy with its mean TTFT each."""
    return [lab_run(policy, ttft_mean_s=value) for policy, value in ttft_mean_s.items()]


@pytest.mark.parametrize(
    ("lmetric", "expected"),
    [
        (0.08, REPRODUCED),
        (0.53, REPRODUCED),
        (0.55, PARTLY),
        (0.96, PARTLY),
        (0.98, NOT),
        (1.5, NOT),
    ],
)
def test_half_the_claimed_size_reproduces_and_more_than_noise_does_in_part(
    lmetric: float, expected: Verdict
) -> None:
    """-92 % is claimed: from -46 % on it is shown, from -3 % on in part."""
    found = judged("vllm_ttft", half_load(lmetric=lmetric, vllm_v1=1.0))
    assert found.verdict is expected
    assert found.ours == pytest.approx(lmetric - 1)
    assert [one.rival for one in found.shown] == ["vllm_v1"]


def test_a_difference_within_the_spread_of_seeds_is_none() -> None:
    """-10 % of seeds that differ by 28 % from one another tell nothing."""
    runs = half_load(lmetric=0.72, vllm_v1=1.0)
    runs += [
        lab_run("lmetric", seed=2, ttft_mean_s=1.08),
        lab_run("vllm_v1", seed=2, ttft_mean_s=1.0),
    ]
    found = judged("vllm_ttft", runs)
    assert found.ours == pytest.approx(-0.1)
    assert found.verdict is NOT


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ([], Verdict.NOT_RUN),
        ([REPRODUCED, REPRODUCED, NOT], REPRODUCED),
        ([REPRODUCED, NOT], PARTLY),
        ([PARTLY, PARTLY], PARTLY),
        ([NOT, PARTLY, NOT], PARTLY),
        ([NOT, NOT], NOT),
    ],
)
def test_more_than_half_of_the_workloads_reproduce(
    grades: list[Verdict], expected: Verdict
) -> None:
    """Half are not enough; any in part is in part."""
    assert verdict(grades) is expected


def test_one_workload_is_enough_for_a_claim_of_existence() -> None:
    """But none in part."""
    assert verdict([NOT, NOT, REPRODUCED], anywhere=True) is REPRODUCED
    assert verdict([NOT, NOT], anywhere=True) is NOT


def test_the_weighted_sum_is_tuned_for_each_workload() -> None:
    """The weight with the lowest mean TTFT is the rival, also where TPOT is compared."""
    runs = [
        lab_run(),
        lab_run("linear_10", ttft_mean_s=0.5, tpot_mean_s=0.01),
        lab_run("linear_70", ttft_mean_s=0.3, tpot_mean_s=0.05),
        lab_run("linear_90", load=0.9, ttft_mean_s=0.01),
    ]
    by_ttft, by_tpot = judged("sweep_ttft", runs), judged("sweep_tpot", runs)
    assert [one.rival for one in (*by_ttft.shown, *by_tpot.shown)] == ["linear_70", "linear_70"]
    assert by_tpot.ours == pytest.approx(-0.6)


def test_only_the_claimed_load_and_the_plain_fleet_count() -> None:
    """90 % load, a tier and stale routers say nothing about half load."""
    others = ({"load": 0.9}, {"variant": "tier"}, {"routers": 4, "staleness_s": 1.0})
    runs = [*half_load(lmetric=1.0, vllm_v1=1.0), lab_run(load=0.9), lab_run(load=1.1)]
    for other in others:
        runs += [lab_run(**other, ttft_mean_s=0.01), lab_run("vllm_v1", **other, ttft_mean_s=0.1)]
    assert [one.ratio for one in judged("vllm_ttft", runs).shown] == [0.0]


def test_past_saturation_somebody_else_may_be_better() -> None:
    """One workload above capacity; below it does not count."""
    runs = [lab_run(load=0.9), lab_run("dynamo", load=0.9, ttft_mean_s=0.1)]
    assert judged("past_saturation", runs).verdict is Verdict.NOT_RUN
    runs += [lab_run(load=1.1), lab_run("dynamo", load=1.1, ttft_mean_s=0.15)]
    runs += [lab_run("vllm_v1", load=1.1, ttft_mean_s=0.9)]
    found = judged("past_saturation", runs)
    assert (found.verdict, found.ours) == (REPRODUCED, pytest.approx(-0.25))


def test_the_detector_is_compared_with_lmetric_without_it() -> None:
    """Where it helps; the workload where it must do nothing does not spoil that."""
    runs = [
        lab_run(workload=workload, variant=variant, ttft_mean_s=ttft_mean_s)
        for workload, variant, ttft_mean_s in (
            ("hot_prefix", "", 0.4),
            ("hot_prefix", "detector", 0.2),
            ("chat", "", 0.2),
            ("chat", "detector", 0.2),
        )
    ]
    found = judged("detector", runs)
    assert [(one.workload, one.ratio) for one in found.shown] == [
        ("hot_prefix", -0.5),
        ("chat", 0.0),
    ]
    assert found.verdict is REPRODUCED


def test_smetric_s_peak_is_over_all_loads_of_the_agents_with_the_tier() -> None:
    """110 at its best load against 100 at another's; chat and the plain fleet do not count."""
    runs = [
        lab_run(policy, workload=workload, load=load, variant=variant, goodput_tokens_per_s=rate)
        for policy, workload, load, variant, rate in (
            ("smetric", "agents", 0.5, "tier", 60.0),
            ("smetric", "agents", 1.1, "tier", 110.0),
            ("lmetric", "agents", 0.5, "tier", 60.0),
            ("lmetric", "agents", 0.9, "tier", 100.0),
            ("lmetric", "agents", 1.1, "tier", 80.0),
            ("lmetric", "agents", 0.9, "", 900.0),
            ("lmetric", "chat", 0.9, "tier", 900.0),
        )
    ]
    peak, grows = judged("smetric_peak", runs), judged("smetric_grows", runs)
    assert (peak.verdict, peak.ours) == (REPRODUCED, pytest.approx(0.1))
    assert (grows.verdict, grows.ours) == (REPRODUCED, pytest.approx(110 / 80 - 1))


@pytest.mark.parametrize(("rate", "expected"), [(93.5, REPRODUCED), (90.0, PARTLY), (80.0, NOT)])
def test_a_bound_is_kept_or_in_part_within_twice_of_it(rate: float, expected: Verdict) -> None:
    """Balancing may fall 7 % behind the best."""
    runs = [
        lab_run(policy, workload="agents", variant="tier", goodput_tokens_per_s=value)
        for policy, value in (("least_loaded", rate), ("round_robin", 50.0), ("smetric", 100.0))
    ]
    assert judged("balancing", runs).verdict is expected


def test_lmetric_reuses_less_than_policies_that_weigh_hits() -> None:
    """The best of those, per load; 30 % against 60 %."""
    runs = [
        lab_run(policy, workload="agents", hit_ratio=ratio)
        for policy, ratio in (("lmetric", 0.3), ("max_hit", 0.6), ("linear_70", 0.5))
    ]
    found = judged("reuse", runs)
    assert (found.verdict, found.ours) == (REPRODUCED, pytest.approx(-0.5))


def test_whatever_falls_short_of_a_claim_is_explained() -> None:
    """Any claim may come out partly or not, in some scenario: there is a why for each."""
    assert set(WHYS) == {claim.identity for claim in CLAIMS}
    assert all(why.endswith(".") for why in WHYS.values())


def test_explanations_are_given_by_a_claim_s_name() -> None:
    """Every claim has a name of its own; what is simply reproduced or not run needs no why."""
    assert len({claim.identity for claim in CLAIMS}) == len(CLAIMS)
    whys = {"vllm_ttft": "because"}
    runs_of = {rate: half_load(lmetric=rate, vllm_v1=1.0) for rate in (0.2, 0.7, 1.0)}
    given = {rate: judged("vllm_ttft", runs, whys=whys) for rate, runs in runs_of.items()}
    assert [one.verdict for one in given.values()] == [REPRODUCED, PARTLY, NOT]
    assert [one.why for one in given.values()] == ["", "because", "because"]
    assert judged("vllm_ttft", [lab_run()], whys=whys).why == ""
    everything = judge(Matrix.of([lab_run()]))
    assert {one.verdict for one in everything} == {Verdict.NOT_RUN}
    assert {one.ours for one in everything} == {None}


def test_a_claim_without_a_size_needs_direction_and_noise() -> None:
    """Lower by 4 % with noise of 3 % is lower; by 2 % it is not, nor is higher."""
    claim = next(one for one in CLAIMS if one.size is None and one.direction == -1)
    assert isinstance(claim, Claim)
    ratios = (-0.04, -0.02, 0.5)
    shown = [Shown(workload="w", load=1.1, ratio=r, noise=0.03, rival="x") for r in ratios]
    assert [grade(claim, one) for one in shown] == [REPRODUCED, NOT, NOT]
