"""Predictions against what engines report: what is compared, counted, told and forgotten."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from builders import make_snapshot
from prometheus_client import REGISTRY

from indexer.contract.limits import NOTICE_BLOCKS_MAX
from indexer.contract.records import Notice
from router.index.notice_queue import PER_INSTANCE_PER_S, QUEUE_BYTES_MAX, NoticeQueue
from router.predictions import WINDOW_S, Predictions, notice_of
from router.request_record import RequestRecord
from router.requests.api_call import ApiCall, TextPrompt
from router.snapshot import Decision

CALL = ApiCall(
    path="/v1/completions",
    body=b"",
    headers=(),
    request_id="r",
    model="m",
    stream=True,
    prompt=TextPrompt(texts=("x",)),
)
HASHES = bytes(range(8 * 6))
FLEET = "m"


@dataclass
class Told:
    """In place of the sender: notes what it is to tell."""

    notices: list[tuple[int, int, Notice]] = field(default_factory=list)

    def tell(self, _: str, slot: int, generation: int, notice: Notice) -> None:
        """Note it."""
        self.notices.append((slot, generation, notice))


@dataclass
class Clock:
    """Seconds as told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        """As told."""
        return self.now_s


@dataclass
class Proof:
    """Predictions with a clock and a sender that can be looked into."""

    told: Told = field(default_factory=Told)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        """Compose."""
        self.predictions = Predictions(cast("NoticeQueue", self.told), self.clock)

    def settle(self, made: Decision, actual_tokens: int | None, **changes: Any) -> str | None:
        """Compare one request; its verdict."""
        record = RequestRecord(
            request_id="r",
            accepted_s=0.0,
            cached_tokens=actual_tokens,
            degraded=changes.pop("degraded", False),
        )
        self.predictions.settle(replace(CALL, **changes), made, HASHES, record)
        return record.prediction


def decision(hit_tokens: int = 48, in_flight_tokens: int = 0, name: str = "h:1/0#x") -> Decision:
    """A decision for the only instance, for 100 tokens."""
    snapshot = make_snapshot(100, hit_tokens=[hit_tokens], names=[name])
    snapshot.in_flight_tokens[0] = in_flight_tokens
    return Decision(
        policy="p",
        snapshot=replace(snapshot, looked_s=7.5),
        scores=cast("Any", [0.0]),
        index=0,
        booked_s=0.0,
    )


def series(name: str, **labels: str) -> float | None:
    """A sample's value; None when the series is not there."""
    return REGISTRY.get_sample_value(f"timestable_router_{name}", labels)


@pytest.mark.parametrize(("actual", "verdict"), [(48, "exact"), (32, "over"), (64, "under")])
def test_a_verdict_is_exact_to_the_token(actual: int, verdict: str) -> None:
    """Over: the index promised more than the engine found; under: less."""
    proof = Proof()
    labels = {"fleet": FLEET, "instance": "h:1/0"}
    before = series("predictions_total", **labels, result=verdict) or 0.0
    cached = series("cached_tokens_actual_total", **labels) or 0.0
    assert proof.settle(decision(), actual) == verdict
    assert series("predictions_total", **labels, result=verdict) == before + 1
    assert series("cached_tokens_actual_total", **labels) == cached + actual


@pytest.mark.parametrize(
    ("actual", "verdict", "told"),
    [(48, "exact", 0), (64, "exact", 0), (80, "exact", 0), (32, "over", 1), (96, "under", 1)],
)
def test_what_is_loaded_from_a_tier_may_be_cached_in_part(
    actual: int, verdict: str, told: int
) -> None:
    """Of 48 hit tokens and 32 to be loaded: the engine may count any of these, and no others."""
    made = decision()
    columns = {"tier_tokens": np.array([32]), "tier_cost_tokens": np.array([4])}
    seen = replace(made.snapshot, **columns, new_prefill_tokens=np.array([100 - 80 + 4]))
    proof = Proof()
    assert proof.settle(replace(made, snapshot=seen), actual) == verdict
    assert len(proof.told.notices) == told


@pytest.mark.parametrize(
    ("actual", "changes"),
    [
        (None, {}),
        (48, {"prompts_count": 2}),
        (48, {"choices_count": 2}),
        (48, {"degraded": True}),
    ],
)
def test_what_proves_nothing_is_not_compared(actual: int | None, changes: dict[str, Any]) -> None:
    """No usage, several prompts or answers, decided without the index."""
    proof = Proof()
    assert proof.settle(decision(), actual, **changes) is None
    view = {"fleets": [{"model_scope": FLEET, "instances": []}]}
    proof.predictions.annotate(view)
    assert view["fleets"][0]["predictions"]["compared"] == 0
    assert proof.told.notices == []


@pytest.mark.parametrize(
    ("hit", "in_flight", "actual", "blocks"),
    [
        (48, 0, 48, None),
        (48, 0, 32, 4),  # worse: up to the deeper of both and one block beyond
        (48, 0, 80, 6),  # better; the chain ends with its sixth block
        (48, 32, 32, None),  # the request in flight did not come through, the index was right
        (48, 32, 0, 2),  # the index was wrong as well: it promised 16
        (48, 32, 64, 5),
    ],
)
def test_a_sidecar_is_told_where_the_index_was_wrong(
    hit: int, in_flight: int, actual: int, blocks: int | None
) -> None:
    """With the time of the look, what the index alone promised, and the chain beyond both."""
    notice = notice_of(decision(hit, in_flight), HASHES, actual)
    if blocks is None:
        assert notice is None
        return
    assert notice == Notice(
        decided_s=7.5,
        predicted_tokens=hit - in_flight,
        actual_tokens=actual,
        hashes=HASHES[: blocks * 8],
    )


@pytest.mark.parametrize(
    ("hit", "in_flight", "first_block"),
    [(0, 0, 0), (16, 0, 0), (48, 0, 2), (48, 32, 0), (80, 0, 4)],
)
def test_what_was_computed_is_told_from_the_last_known_block_on(
    hit: int, in_flight: int, first_block: int
) -> None:
    """Only of decisions by estimate, and those are compared with nothing."""
    proof = Proof()
    exact = decision(hit, in_flight)
    proof.predictions.computed(exact, HASHES)
    assert proof.told.notices == []
    by_text = replace(exact, snapshot=replace(exact.snapshot, approximate=True))
    proof.predictions.computed(by_text, b"")
    proof.predictions.computed(by_text, HASHES)
    ((slot, generation, notice),) = proof.told.notices
    assert (slot, generation) == (0, 1)
    assert notice == Notice(
        decided_s=7.5,
        predicted_tokens=0,
        actual_tokens=0,
        hashes=HASHES[first_block * 8 :],
        computed=True,
        first_block=first_block,
    )
    assert proof.settle(by_text, 0) is None
    assert len(proof.told.notices) == 1


def test_notices_go_to_the_slot_and_not_for_prompts_that_read_nothing() -> None:
    """Log probabilities of a prompt hit nothing, whatever is resident."""
    proof = Proof()
    proof.settle(decision(0), 32, reads_prefixes=False)
    assert proof.told.notices == []
    proof.settle(decision(0), 32)
    assert [(slot, generation) for slot, generation, _ in proof.told.notices] == [(0, 1)]


def test_the_share_of_exact_predictions_is_of_the_last_ten_minutes() -> None:
    """Per fleet and per instance, in the view and as a gauge; older requests fall out."""
    proof = Proof()
    completeness = {FLEET: {"h:1/0": 1.0, "h:2/0": 0.5}}

    def shown() -> tuple[Any, Any]:
        view: dict[str, Any] = {
            "fleets": [{"model_scope": FLEET, "instances": [{"instance_id": "h:2/0#y"}]}]
        }
        proof.predictions.annotate(view)
        (fleet,) = view["fleets"]
        return fleet["predictions"], fleet["instances"][0]["predictions"]

    for actual in (48, 48, 0):
        proof.settle(decision(), actual)
    proof.clock.now_s += WINDOW_S / 2
    proof.settle(decision(name="h:2/0#y"), 16)
    proof.predictions.tend(completeness)
    assert series("exact_prediction_ratio", fleet=FLEET) == 0.5
    assert shown()[0] == {
        "compared": 4,
        "exact_ratio": 0.5,
        "over": 2,
        "under": 0,
        "hit_ratio_predicted": 0.48,
        "hit_ratio_actual": 0.28,
    }
    assert shown()[1]["exact_ratio"] == 0.0

    proof.clock.now_s += WINDOW_S * 0.6
    proof.predictions.tend(completeness)
    assert shown()[0]["compared"] == 1
    proof.clock.now_s += WINDOW_S
    proof.predictions.tend(completeness)
    assert shown()[1]["exact_ratio"] is None
    assert math.isnan(series("exact_prediction_ratio", fleet=FLEET) or 0)


def test_series_go_with_their_instance() -> None:
    """And stay through a restart, which keeps host, port and rank."""
    proof = Proof()
    proof.settle(decision(name="h:8/0#x"), 48)
    proof.settle(decision(name="h:9/0#x"), 48)
    proof.predictions.tend({FLEET: {"h:8/0": 0.25, "h:9/0": 1.0}})
    assert series("instance_completeness_ratio", fleet=FLEET, instance="h:8/0") == 0.25
    proof.settle(decision(name="h:8/0#restarted"), 48)
    proof.predictions.tend({FLEET: {"h:8/0": 0.5}})

    def compared(instance: str) -> float | None:
        return series("predictions_total", fleet=FLEET, instance=instance, result="exact")

    assert (compared("h:8/0"), compared("h:9/0")) == (2.0, None)
    assert series("instance_completeness_ratio", fleet=FLEET, instance="h:9/0") is None
    proof.predictions.tend({})
    assert compared("h:8/0") is None
    assert series("exact_prediction_ratio", fleet=FLEET) is None


def test_notices_have_bounds() -> None:
    """About ten a second for an instance, so many bytes in all, no chain without end."""
    notices = NoticeQueue(cast("Any", None), deadline_s=1.0)

    def refused(reason: str) -> float:
        return series("notices_total", result=reason) or 0.0

    small = Notice(decided_s=0.0, predicted_tokens=0, actual_tokens=16, hashes=b"h" * 16)
    before = refused("too_many")
    for _ in range(30):
        notices.tell(cast("Any", "f"), 1, 1, small)
    assert PER_INSTANCE_PER_S <= notices.waiting() < 15
    assert refused("too_many") == before + 30 - notices.waiting()

    before = refused("too_long")
    endless = replace(small, hashes=b"h" * 8 * (NOTICE_BLOCKS_MAX + 1))
    notices.tell(cast("Any", "f"), 2, 1, endless)
    assert refused("too_long") == before + 1

    long = replace(small, hashes=b"h" * 8 * NOTICE_BLOCKS_MAX)
    before, waited = refused("queue_full"), notices.waiting()
    for slot in range(100, 200):
        notices.tell(cast("Any", "f"), slot, 1, long)
    queued = notices.waiting() - waited
    assert refused("queue_full") == before + 100 - queued
    assert queued == (QUEUE_BYTES_MAX - waited * len(small.encode())) // len(long.encode())
