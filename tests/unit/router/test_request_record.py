"""What is told of a request at its end: the canonical line, the counts, the stages."""

import io
import json
import re
from dataclasses import fields
from typing import Any

import pytest
from builders import make_snapshot
from prometheus_client import REGISTRY

from router.log_lines import set_up_logging
from router.request_record import Reason, RequestRecord, Stage, reason_of, tell
from router.snapshot import Decision

ALWAYS = {
    *("request_id", "trace_id", "endpoint", "api_key", "model", "fleet", "policy", "instance_id"),
    *("reason", "prompt_tokens", "hit_tokens", "hit_ratio", "new_prefill_tokens", "batch_size"),
    *("queued_prefill_tokens", "score", "degraded_cause", "retries_count", "status", "stream"),
    *("ttft_s", "e2e_s", "cached_tokens", "prediction", "outcome"),
}


def decision(index: int = 0, **columns: list[int]) -> Decision:
    """Of 100 tokens, for the instance in this place."""
    snapshot = make_snapshot(100, **columns)
    scores = snapshot.new_prefill_tokens.astype(float)
    return Decision(policy="lmetric", snapshot=snapshot, scores=scores, index=index)


def sample(name: str, **labels: str) -> float:
    """A metric's value; 0 before it is there."""
    return REGISTRY.get_sample_value(f"timestable_router_{name}", labels) or 0.0


def line_of(record: RequestRecord, monkeypatch: pytest.MonkeyPatch, **how: Any) -> str:
    """What is written for it."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    set_up_logging("info", **how)
    tell(record)
    return out.getvalue()


def test_the_canonical_line_says_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON object, the same fields whatever happened, and the seconds of each stage."""
    record = RequestRecord(request_id="r", accepted_s=0.0, prompt_tokens=100)
    record.lap(Stage.RECEIVE)
    record.note(decision(hit_tokens=[16, 0]))
    written = line_of(record, monkeypatch)
    line = json.loads(written)
    assert written.count("\n") == 1
    assert set(line) >= ALWAYS
    assert (line["event"], line["hit_ratio"], line["reason"]) == (
        "request_routed",
        0.16,
        "most_hits",
    )
    assert {"receive_s", "reserve_s"} <= set(line)
    unseen = {
        *("accepted_s", "received_s", "laps", "decisions", "on_decision", "trace", "held_by"),
    }
    assert {one.name for one in fields(RequestRecord)} - set(line) == unseen


def test_a_line_for_a_person_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Console: the same words, no JSON, no colour codes where nobody sees them."""
    written = line_of(
        RequestRecord(request_id="r", accepted_s=0.0), monkeypatch, line_format="console"
    )
    assert written.count("\n") == 1
    assert re.search(r"request_routed .*outcome=internal_error", written)
    assert "\x1b" not in written


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (decision(hit_tokens=[16]), Reason.ONLY),
        (decision(hit_tokens=[0, 0]), Reason.NO_HITS),
        (decision(hit_tokens=[16, 0]), Reason.MOST_HITS),
        (decision(hit_tokens=[16, 16]), Reason.MOST_HITS),
        (decision(hit_tokens=[16, 32]), Reason.LESS_LOAD),
    ],
)
def test_a_decision_has_one_reason(made: Decision, reason: Reason) -> None:
    """Whether hits decided, or load did."""
    assert reason_of(made) == reason


def test_stages_add_up_to_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time between two stages is lost; a stage of two attempts is both together."""
    ticks = iter([1.0, 1.5, 3.0, 3.25, 7.0])
    monkeypatch.setattr("router.request_record.time.monotonic", lambda: next(ticks))
    record = RequestRecord(request_id="r", accepted_s=0.5)
    record.lap(Stage.RECEIVE)
    record.note(decision(hit_tokens=[0, 0]))
    record.lap(Stage.FAILED)
    record.note(decision(1, hit_tokens=[0, 0]))
    record.lap(Stage.FIRST_BYTE)
    stages = record.stage_seconds()
    assert stages == {
        Stage.RECEIVE: 0.5,
        Stage.RESERVE: 0.75,
        Stage.FAILED: 1.5,
        Stage.FIRST_BYTE: 3.75,
    }
    assert sum(stages.values()) == 7.0 - record.accepted_s


def test_a_request_is_counted_by_stage_and_decision() -> None:
    """Once for each stage it came to, and once for each decision."""
    counted = ("stage_seconds_count", {"stage": "receive"})
    decided = ("decisions_total", {"policy": "lmetric", "reason": "only"})
    before = [sample(name, **labels) for name, labels in (counted, decided)]
    record = RequestRecord(request_id="r", accepted_s=0.0)
    record.lap(Stage.RECEIVE)
    record.note(decision(hit_tokens=[0]))
    tell(record)
    after = [sample(name, **labels) for name, labels in (counted, decided)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1.0, 1.0]
