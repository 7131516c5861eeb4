"""What a person is told who asks why a request went where it went."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_snapshot

from router.decide import decide
from router.decode_leg import DECODE_LEG
from router.http.dashboard.explanation import MEASURE, arithmetic, explain
from router.policies import POLICIES
from router.snapshot import Decision, RequestView

LOWEST = "a had the lowest score"

VIEW = RequestView(request_id="r", sequence=1, prompt_tokens=1000)


def decided(policy: str = "lmetric", **columns: list[int]) -> Decision:
    """By this policy, for 1,000 tokens."""
    return decide(POLICIES[policy], VIEW, make_snapshot(1000, **columns))


def test_every_policy_has_its_measure_in_words() -> None:
    """Whoever adds a policy says what its score is made of."""
    assert set(MEASURE) == {*POLICIES, DECODE_LEG.name}


def test_a_session_is_said_to_stay_or_to_begin() -> None:
    """By which of both rules, in the terms of that one."""
    columns = {"hit_tokens": [800, 0], "batch_size": [2, 1]}
    first = explain(decided("smetric", **columns))
    assert first == (
        f"{LOWEST} of 2 instances: (0 + 200) × (2 + 1) = 600, because its session begins or has "
        "to move."
    )
    follow_up = replace(VIEW, turn=1, history_tokens=800)
    stays = explain(decide(POLICIES["smetric"], follow_up, make_snapshot(1000, **columns)))
    assert stays == f"{LOWEST} of 2 instances: 200.01 ({MEASURE['smetric']})."


def test_who_holds_what_is_named_needs_no_score() -> None:
    """The answer that a request names is in one engine's memory only."""
    told = explain(decided(hit_tokens=[0]), held=True)
    assert told == "a holds the earlier answer that the request names; nobody else does."


def test_the_arithmetic_gives_the_score() -> None:
    """What is written out is what was compared."""
    one = decided(hit_tokens=[400], queued_prefill_tokens=[1500], batch_size=[3]).candidates[0]
    assert arithmetic(one) == "(1,500 + 600) × (3 + 1) = 8,400"
    assert one.score == (1500 + 600) * (3 + 1)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"hit_tokens": [0]}, "a was the only instance that could take the request."),
        (
            {"hit_tokens": [0, 608], "batch_size": [0, 4]},
            (
                f"{LOWEST} of 2 instances: (0 + 1,000) × (0 + 1) = 1,000. b holds more of "
                "the prompt (608 tokens against 0), but with 0 tokens queued and 4 requests it "
                "scores 1,960."
            ),
        ),
        (
            {"hit_tokens": [496, 0, 0], "batch_size": [1, 2, 3]},
            (
                f"{LOWEST} of 3 instances: (0 + 504) × (1 + 1) = 1,008. The next best, b, "
                "scores 3,000: it holds 496 tokens less of the prompt, it has 2 requests against 1."
            ),
        ),
        (
            {"hit_tokens": [0, 0], "queued_prefill_tokens": [0, 1]},
            (
                f"{LOWEST} of 2 instances: (0 + 1,000) × (0 + 1) = 1,000. The next best, "
                "b, scores 1,001: 1 more tokens wait there."
            ),
        ),
    ],
)
def test_the_product_is_told_against_whoever_one_would_have_expected(
    columns: dict[str, list[int]], expected: str
) -> None:
    """Against the instance with more of the prompt, else against the next best."""
    assert explain(decided(**columns)) == expected


def test_equals_are_told_as_equals() -> None:
    """Nobody is said to be better than somebody with the same score."""
    assert "shared the lowest score of 3 instances with 2 and won the tie-break" in explain(
        decided(hit_tokens=[0, 0, 0])
    )


def test_a_booking_that_differs_from_the_lookup_is_told_as_one() -> None:
    """Redis chose by later counters; by those shown another one looks cheaper."""
    snapshot = make_snapshot(1000, hit_tokens=[0, 0], batch_size=[5, 0])
    told = explain(decide(POLICIES["lmetric"], VIEW, snapshot, place=0, booked_s=1.0))
    assert told == (
        "a was the best of 2 instances when the request was booked: (0 + 1,000) × (5 + 1) = 6,000."
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_any_policy_and_any_score_can_be_told(policy: str) -> None:
    """Infinite is never; without the index, that comes first."""
    snapshot = make_snapshot(1000, hit_tokens=[16, 0], batch_size=[9, 0])
    scores = np.array([np.inf, np.inf])
    decision = Decision(policy=policy, snapshot=snapshot, scores=scores, index=0)
    assert "never" in explain(decision)
    assert explain(decided(policy, hit_tokens=[0, 16])).endswith(".")
