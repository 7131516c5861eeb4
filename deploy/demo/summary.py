"""Pure: the figures of the demo, from what clients, routers, engines and sidecars saw."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from deploy.demo.audit import Audit, ServedRequest
from loadgen.metrics import Distribution, figures
from loadgen.records import RequestRecord

UNEXPLAINED_SHARE_MAX = 0.005
"""More mispredicted requests than this that no block event explains are a defect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Figures of one policy. TTFT and TPOT are simulated seconds, router_added real ones.

    Attributes:
        requests: sent.
        errors: of them, those that got no whole answer.
        hit_ratio_actual: prompt tokens the engines reused / prompt tokens.
        hit_ratio_predicted: hit tokens of the decisions / prompt tokens.
        predicted_exactly_share: requests whose prediction came true to the token.
        mismatch_unexplained_share: requests whose misprediction no block event explains.
        imbalance: largest over mean busy time of the instances.
        router_added_p50_s: body received to sent on, plus first upstream byte to first byte out.
        router_added_p99_s: of the same.
    """

    requests: int
    errors: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    hit_ratio_actual: float
    hit_ratio_predicted: float
    predicted_exactly_share: float
    mismatch_unexplained_share: float
    imbalance: float
    router_added_p50_s: float
    router_added_p99_s: float


def in_simulated_time(record: RequestRecord, speedup: float) -> RequestRecord:
    """The record with all times since the start of the run in the engines' seconds."""

    def scaled(time_s: float | None) -> float | None:
        return None if time_s is None else time_s * speedup

    return replace(
        record,
        scheduled_s=record.scheduled_s * speedup,
        sent_s=scaled(record.sent_s),
        first_token_s=scaled(record.first_token_s),
        token_times_s=tuple(time_s * speedup for time_s in record.token_times_s),
        finished_s=scaled(record.finished_s),
    )


def served(record: RequestRecord, prompt: Sequence[int]) -> ServedRequest | None:
    """What the audit needs of a record in real time; None where there is no answer to judge."""
    decision = record.decision
    if record.error is not None or decision is None or record.cached_tokens is None:
        return None
    if decision["degraded"]:  # made without the index: it predicts nothing
        return None
    if record.first_token_s is None or record.sent_s is None or record.sent_unix_s is None:
        return None
    return ServedRequest(
        request_id=record.request_id,
        instance_id=str(decision["instance"]),
        decided_s=_number(decision, "decided_s"),
        first_token_s=record.sent_unix_s + record.first_token_s - record.sent_s,
        prompt=prompt,
        predicted_tokens=int(_number(decision, "hit_tokens")),
        actual_tokens=record.cached_tokens,
        in_flight_tokens=int(_number(decision, "in_flight_tokens")),
    )


def result(
    records: Sequence[RequestRecord],
    *,
    audit: Audit,
    busy_s: Sequence[float],
    router_added_s: Sequence[float],
) -> PolicyResult:
    """Figures of one policy.

    Args:
        records: in simulated time.
        audit: of the answered ones.
        busy_s: per instance, within this run.
        router_added_s: per request.
    """
    client = figures(records)
    added = Distribution.of(router_added_s)
    mean_busy_s = float(np.mean(busy_s))
    return PolicyResult(
        requests=client.requests_count,
        errors=client.errors_count,
        ttft_mean_s=client.ttft_s.mean if client.ttft_s else 0.0,
        ttft_p50_s=client.ttft_s.p50 if client.ttft_s else 0.0,
        ttft_p99_s=client.ttft_s.p99 if client.ttft_s else 0.0,
        tpot_mean_s=client.tpot_s.mean if client.tpot_s else 0.0,
        tpot_p50_s=client.tpot_s.p50 if client.tpot_s else 0.0,
        tpot_p99_s=client.tpot_s.p99 if client.tpot_s else 0.0,
        hit_ratio_actual=client.hit_ratio_actual or 0.0,
        hit_ratio_predicted=client.hit_ratio_predicted or 0.0,
        predicted_exactly_share=audit.predicted_exactly_share,
        mismatch_unexplained_share=audit.mismatch_unexplained_share,
        imbalance=max(busy_s) / mean_busy_s if mean_busy_s else 0.0,
        router_added_p50_s=added.p50 if added else 0.0,
        router_added_p99_s=added.p99 if added else 0.0,
    )


def failures(results: Mapping[str, PolicyResult]) -> list[str]:
    """What makes a run of the demo count as failed; empty when nothing does."""
    found = []
    for policy, one in results.items():
        if one.errors:
            found.append(f"{policy}: {one.errors} of {one.requests} requests failed")
        if one.mismatch_unexplained_share > UNEXPLAINED_SHARE_MAX:
            found.append(
                f"{policy}: {one.mismatch_unexplained_share:.2%} of the requests hit other "
                f"blocks than predicted without a block event to explain it "
                f"(at most {UNEXPLAINED_SHARE_MAX:.1%})"
            )
    return found


def as_json(results: Mapping[str, PolicyResult]) -> dict[str, dict[str, Any]]:
    """Results by policy, as in the summary file."""
    return {policy: asdict(one) for policy, one in results.items()}


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields[name]
    assert isinstance(value, int | float), (name, value)
    return value
