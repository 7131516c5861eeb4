"""What the papers claim, beside what the lab's runs show, with a verdict by a stated rule. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from loadgen.simulation.lab.report import evidence
from loadgen.simulation.lab.report.cells import Matrix
from loadgen.simulation.lab.report.evidence import Evidence, Shown

RULE = (
    "A workload shows a claim when its difference has the claimed direction, exceeds the noise "
    "and is at least half the claimed size; it shows part of it when only the first two hold. "
    "Where a paper gives no size, direction and noise decide. Noise is 3 %, or the spread of the "
    "seeds where that is larger. The verdict is “reproduced” when more than half of the workloads "
    "show the claim, “partly” when any shows it or part of it, else “not”. A claim of a "
    "bound is shown within it, and in part within twice of it. A claim that something is so "
    "somewhere needs one workload. “Ours” is the median over workloads."
)

PART_OF_SIZE = 0.5
PART_OF_BOUND = 2.0


class Verdict(Enum):
    """How a claim fared."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a paper says.

    Args:
        identity: short and lasting; explanations are given under it.
        text: the claim in words.
        theirs: the paper's figure, as it is printed.
        direction: -1 when the figure is claimed to be lower, +1 when higher.
        size: least relative difference claimed; None when the paper gives none.
        within: the size is a bound: the figure falls behind by no more than it.
        anywhere: one workload suffices.
    """

    identity: str
    paper: str
    text: str
    theirs: str
    direction: int
    size: float | None
    evidence: Evidence
    within: bool = False
    anywhere: bool = False


_LMETRIC, _SMETRIC = "LMetric", "SMetric"

CLAIMS = (
    Claim(
        identity="vllm_ttft",
        paper=_LMETRIC,
        text="Mean TTFT of lmetric against vLLM's own balancer (vllm_v1), at half load",
        theirs="-92 %",
        direction=-1,
        size=0.92,
        evidence=evidence.against("ttft_mean_s", "vllm_v1"),
    ),
    Claim(
        identity="vllm_tpot",
        paper=_LMETRIC,
        text="Mean TPOT of lmetric against vLLM's own balancer (vllm_v1), at half load",
        theirs="-24 %",
        direction=-1,
        size=0.24,
        evidence=evidence.against("tpot_mean_s", "vllm_v1"),
    ),
    Claim(
        identity="tuned_ttft",
        paper=_LMETRIC,
        text="Mean TTFT of lmetric against a tuned weighted scheduler (bailian), at half load",
        theirs="-39 %",
        direction=-1,
        size=0.39,
        evidence=evidence.against("ttft_mean_s", "bailian"),
    ),
    Claim(
        identity="tuned_tpot",
        paper=_LMETRIC,
        text="Mean TPOT of lmetric against a tuned weighted scheduler (bailian), at half load",
        theirs="-51 %",
        direction=-1,
        size=0.51,
        evidence=evidence.against("tpot_mean_s", "bailian"),
    ),
    Claim(
        identity="sweep_ttft",
        paper=_LMETRIC,
        text="Mean TTFT of lmetric against the weighted sum (linear_*) whose weight is best for "
        "the workload, at half load",
        theirs="-39 %",
        direction=-1,
        size=0.39,
        evidence=evidence.against("ttft_mean_s", prefix="linear_"),
    ),
    Claim(
        identity="sweep_tpot",
        paper=_LMETRIC,
        text="Mean TPOT of lmetric against that same weighted sum, at half load",
        theirs="-51 %",
        direction=-1,
        size=0.51,
        evidence=evidence.against("tpot_mean_s", prefix="linear_"),
    ),
    Claim(
        identity="new_tokens_p50",
        paper=_LMETRIC,
        text="P50 TTFT with new prefill tokens as first factor against 1 - hit ratio "
        "(hit_ratio_product), at half load",
        theirs="-14.4 %",
        direction=-1,
        size=0.144,
        evidence=evidence.against("ttft_p50_s", "hit_ratio_product"),
    ),
    Claim(
        identity="new_tokens_p95",
        paper=_LMETRIC,
        text="P95 TTFT, the same comparison",
        theirs="-42.8 %",
        direction=-1,
        size=0.428,
        evidence=evidence.against("ttft_p95_s", "hit_ratio_product"),
    ),
    Claim(
        identity="past_saturation",
        paper=_LMETRIC,
        text="Past saturation lmetric does not dominate: another policy has a lower mean TTFT",
        theirs="lower somewhere",
        direction=-1,
        size=None,
        evidence=evidence.others_past_saturation,
        anywhere=True,
    ),
    Claim(
        identity="detector",
        paper=_LMETRIC,
        text="Where one hot prefix misleads the product, the detector lowers mean TTFT",
        theirs="lower",
        direction=-1,
        size=None,
        evidence=evidence.with_detector,
        anywhere=True,
    ),
    Claim(
        identity="smetric_peak",
        paper=_SMETRIC,
        text="Peak tokens/s within the SLO of smetric against the best other policy, agents, "
        "global KV tier",
        theirs="+9 % to +15 %",
        direction=1,
        size=0.09,
        evidence=evidence.smetric_peak("goodput_tokens_per_s", evidence.TIER),
    ),
    Claim(
        identity="smetric_grows",
        paper=_SMETRIC,
        text="That gain grows past saturation (gain there less gain at the lowest load)",
        theirs="grows",
        direction=1,
        size=None,
        evidence=evidence.smetric_gain_grows,
    ),
    Claim(
        identity="smetric_prefill",
        paper=_SMETRIC,
        text="Peak prefill tokens/s of smetric against the best other policy, agents, "
        "disaggregated prefill",
        theirs="+9 %",
        direction=1,
        size=0.09,
        evidence=evidence.smetric_peak("prompt_tokens_per_s", evidence.DISAGGREGATED),
    ),
    Claim(
        identity="reuse",
        paper=_SMETRIC,
        text="Without a tier lmetric reuses far less than a policy that weighs hits, agents",
        theirs="far less",
        direction=-1,
        size=None,
        evidence=evidence.reuse_without_tier,
    ),
    Claim(
        identity="balancing",
        paper=_SMETRIC,
        text="With a full tier pure balancing is within 7 % of the best, agents",
        theirs="within 7 %",
        direction=-1,
        size=0.07,
        evidence=evidence.balancing_peak,
        within=True,
    ),
)
"""Not judged: that a scheduler which simulates every engine has about 10 % less mean TTFT on a
tool-agent trace, as the lab has no such scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim beside our runs.

    Args:
        grades: of each that was shown, in the same order.
        ours: median relative difference; None when no run can tell.
        why: an explanation that somebody wrote, of a claim that is not simply reproduced or that
            wants a single workload; else empty.
    """

    claim: Claim
    shown: tuple[Shown, ...]
    grades: tuple[Verdict, ...]
    ours: float | None
    verdict: Verdict
    why: str = ""


def judge(
    matrix: Matrix, *, agents: Collection[str] = (), whys: Mapping[str, str] | None = None
) -> list[Judged]:
    """Every claim.

    Args:
        matrix: the runs.
        agents: names of the agents' workloads, for claims about those.
        whys: explanations by a claim's identity.
    """
    judged = []
    for claim in CLAIMS:
        shown = tuple(claim.evidence(matrix, agents))
        grades = tuple(grade(claim, one) for one in shown)
        found = verdict(grades, anywhere=claim.anywhere)
        wants_why = found in (Verdict.PARTLY, Verdict.NOT) or (claim.anywhere and bool(grades))
        judged.append(
            Judged(
                claim=claim,
                shown=shown,
                grades=grades,
                ours=median(one.ratio for one in shown) if shown else None,
                verdict=found,
                why=(whys or {}).get(claim.identity, "") if wants_why else "",
            )
        )
    return judged


def grade(claim: Claim, shown: Shown) -> Verdict:
    """What one workload shows."""
    achieved = claim.direction * shown.ratio
    if claim.within:
        assert claim.size is not None, claim.identity
        if achieved <= claim.size:
            return Verdict.REPRODUCED
        return Verdict.PARTLY if achieved <= PART_OF_BOUND * claim.size else Verdict.NOT
    if achieved <= shown.noise:
        return Verdict.NOT
    if claim.size is not None and achieved < PART_OF_SIZE * claim.size:
        return Verdict.PARTLY
    return Verdict.REPRODUCED


def verdict(grades: Sequence[Verdict], *, anywhere: bool = False) -> Verdict:
    """Over workloads."""
    if not grades:
        return Verdict.NOT_RUN
    if grades.count(Verdict.REPRODUCED) > (0 if anywhere else len(grades) / 2):
        return Verdict.REPRODUCED
    return Verdict.NOT if set(grades) == {Verdict.NOT} else Verdict.PARTLY
