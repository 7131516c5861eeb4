"""Each baseline's rule on a small fleet, computed by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from builders import make_request, make_snapshot

from router.decide import rank
from router.eligibility import without
from router.policies import POLICIES
from router.policies.bailian import Bailian
from router.policies.base import Policy
from router.snapshot import FleetSnapshot, RequestView

# Three instances with blocks of 16 tokens, a prompt of 100 tokens:
#              a        b        c
# hits         0       64       96
# queued       0      100       10
# batch        0        1        9
# waiting      0        0        2
# KV$ usage    0      0.1      0.5     (of 100 blocks: 0, 160 and 800 tokens)
PROMPT_TOKENS = 100


def case(
    prompt_tokens: int = PROMPT_TOKENS,
    *,
    capacity_blocks: int | None = 100,
    prefill_tokens_per_s: float | None = None,
    **changes: list[int],
) -> FleetSnapshot:
    """The fleet above, with changes."""
    columns = {
        "hit_tokens": [0, 64, 96],
        "queued_prefill_tokens": [0, 100, 10],
        "batch_size": [0, 1, 9],
        "waiting_count": [0, 0, 2],
    }
    fleet = make_snapshot(prompt_tokens, **columns | changes)
    instances = tuple(
        replace(one, capacity_blocks=capacity_blocks, prefill_tokens_per_s=prefill_tokens_per_s)
        for one in fleet.instances
    )
    return replace(fleet, instances=instances, kv_usage_ratio=np.array([0.0, 0.1, 0.5]))


def winner(policy: Policy, request: RequestView, fleet: FleetSnapshot) -> str:
    """The name of the chosen one."""
    place = rank(policy(request, fleet), request, fleet, 1)[0]
    return fleet.instances[place].instance_id


def shares(name: str, fleet: FleetSnapshot, requests_count: int = 3000) -> dict[str, float]:
    """How often each instance is chosen by requests that differ by their id only."""
    won = Counter(
        winner(POLICIES[name], make_request(PROMPT_TOKENS, request_id=f"r{i}"), fleet)
        for i in range(requests_count)
    )
    return {name: count / requests_count for name, count in won.items()}


@pytest.mark.parametrize(
    ("name", "fleet", "expected", "chosen"),
    [
        # 0 + 100 - 0, 100 + 100 - 64, 10 + 100 - 96; ties by batch / (9 + 1).
        ("least_prefill", case(), [100, 136.1, 14.9], "c"),
        # 1 x 1, 0.36 x 2, 0.04 x 10: the tokens queued on b do not count.
        ("hit_ratio_product", case(), [1, 0.72, 0.4], "c"),
        # 0 + 100 x 1, 100 + 36 x 2, 10 + 4 x 10.
        ("caused_delay", case(), [100, 172, 50], "c"),
        # Missed 1, 0.36, 0.04; load 0, 1/9, 9/9.
        ("linear_30", case(), [0.3, 0.108 + 0.7 / 9, 0.012 + 0.7], "b"),
        ("linear_90", case(), [0.9, 0.324 + 0.1 / 9, 0.036 + 0.1], "c"),
        # An idle fleet has no load term.
        ("linear_10", case(batch_size=[0, 0, 0]), [0.1, 0.036, 0.004], "c"),
        # 9 - 0 > 8: batch sizes.
        ("aibrix", case(), [0, 1, 9], "a"),
        # 8 - 0: mean 3, deviation sqrt((9 + 4 + 25) / 2) = 4.36: c is above 7.36, so behind 101.
        ("aibrix", case(batch_size=[0, 1, 8]), [100, 36 + 1 / 9, 101 + 4 + 8 / 9], "b"),
        # Mean 2, deviation 1: c is at 3, not above.
        ("aibrix", case(batch_size=[1, 2, 3]), [100.25, 36.5, 4.75], "c"),
        # (0 + 100 - 0) / 16, (100 + 100 - 64) / 16, (10 + 100 - 96) / 16; 0, 10 and 50 blocks held.
        ("dynamo", case(), [6.25, 8.5 + 10, 0.875 + 50], "a"),
        # Of unknown capacity: 0, 1 and 9 times 100 / 16 blocks held.
        ("dynamo", case(capacity_blocks=None), [6.25, 8.5 + 6.25, 0.875 + 56.25], "a"),
        # 7 - (0 + 2 + 2), 7 - (3 x 0.64 + 2 + 1.8), 7 - (3 x 0.96 + 0 + 1).
        ("llm_d_scorers", case(), [3, 1.28, 3.12], "b"),
        # Equal queues are all short: 7 - (2.88 + 2 + 1).
        ("llm_d_scorers", case(waiting_count=[2, 2, 2]), [3, 1.28, 1.12], "c"),
        # 0.8 x 96 = 76.8 tokens make sticky: c alone. Tokens 100, 136, 14; the others behind 136.
        ("llm_d_sticky", case(), [137 + 100, 137 + 136, 14], "c"),
        # Nobody is sticky: tokens alone.
        ("llm_d_sticky", case(hit_tokens=[0, 64, 64]), [100, 136, 46], "c"),
        # 300,000 tokens at 15,928 a second are 18.8 s, over 18 s longer than a's none: saturated.
        (
            "llm_d_sticky",
            case(queued_prefill_tokens=[0, 100, 300_000]),
            [100, 136, 300_004],
            "a",
        ),
        # Of 96 tokens 80 can be reused, and c has 0.8 of those.
        ("llm_d_sticky", case(96, hit_tokens=[0, 48, 64]), [149 + 96, 149 + 148, 42], "c"),
        # Where all queue as long nobody is saturated.
        (
            "llm_d_sticky",
            case(queued_prefill_tokens=[300_000, 300_000, 300_000]),
            [300_101 + 300_100, 300_101 + 300_036, 300_004],
            "c",
        ),
        # At 20,000 a second they are 15 s.
        (
            "llm_d_sticky",
            case(queued_prefill_tokens=[0, 100, 300_000], prefill_tokens_per_s=20_000.0),
            [300_105, 300_141, 300_004],
            "c",
        ),
        # Mean 3.33: 9 is over 1.5 times that, and not over 67.3.
        ("smg_cache_aware", case(), [100, 36.1, 4.9], "c"),
        # Mean 43.7: 130 is over 65.5 and over 107.7.
        ("smg_cache_aware", case(batch_size=[0, 1, 130]), [0, 1, 130], "a"),
        # Mean 220: 290 is over 284, and not over 330.
        (
            "smg_cache_aware",
            case(batch_size=[180, 190, 290]),
            [100 + 180 / 291, 36 + 190 / 291, 4 + 290 / 291],
            "c",
        ),
        # The overloaded one is not the longest match.
        ("smg_cache_aware", case(batch_size=[130, 1, 0]), [100 + 130 / 131, 36 + 1 / 131, 4], "c"),
        # 96 > 50 tokens: the longest match, nothing sent yet.
        ("preble", case(), [100, 36, 4], "c"),
        # Half is not over half, and nobody has had work: a tie that new tokens break.
        ("preble", case(96, hit_tokens=[0, 0, 48]), [0, 0, 0], "c"),
    ],
)
def test_a_baseline_gives_its_formula(
    name: str, fleet: FleetSnapshot, expected: list[float], chosen: str
) -> None:
    """Scores are the formula of the docstring, and the lowest is chosen."""
    prompt_tokens = int(fleet.hit_tokens[0] + fleet.new_prefill_tokens[0])
    policy, request = POLICIES[name], make_request(prompt_tokens)
    assert policy(request, fleet).tolist() == pytest.approx(expected)
    assert winner(policy, request, fleet) == chosen


def test_the_artifacts_product_credits_the_whole_prompt_and_lists_equals() -> None:
    """96 tokens are six blocks: a holds all of them, though five are all that is reused."""
    #               a     b     c
    # depth        96    80     0
    # hits         80    80     0
    # batch         7     0     0
    fleet = make_snapshot(96, hit_tokens=[80, 80, 0], batch_size=[7, 0, 0])
    fleet = replace(fleet, depth_tokens=np.array([96, 80, 0]))
    request = make_request(96)
    scores = POLICIES["lmetric_artifact"](request, fleet)
    assert scores.tolist() == pytest.approx([0 * 8, 16 * 1 + 1 / 3, 96 * 1 + 2 / 3])
    assert winner(POLICIES["lmetric"], request, fleet) == "b"  # 16 x 8 against 16 x 1
    # Hits by siblings seen at the reservation count, though the index does not have them yet.
    fleet = replace(fleet, depth_tokens=np.array([0, 0, 0]))
    scores = POLICIES["lmetric_artifact"](request, fleet)
    assert scores.tolist() == pytest.approx([16 * 8, 16 * 1 + 1 / 3, 96 * 1 + 2 / 3])

    equals = make_snapshot(96, hit_tokens=[0, 0, 0])
    backwards = replace(equals, slot=equals.slot[::-1])
    for i in range(20):
        request = make_request(96, request_id=f"r{i}")
        assert winner(POLICIES["lmetric_artifact"], request, equals) == "a"
        assert winner(POLICIES["lmetric_artifact"], request, backwards) == "c"


def test_chance_is_fair() -> None:
    """Every instance has the same chance, whatever it holds and does."""
    assert shares("random", case()) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, abs=0.03)


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    """Of three pairs a wins the two it is in, b the third; of equals each wins its share."""
    assert shares("power_of_two", case()) == pytest.approx({"a": 2 / 3, "b": 1 / 3}, abs=0.03)
    equals = case(batch_size=[5, 5, 5])
    expected = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    assert shares("power_of_two", equals) == pytest.approx(expected, abs=0.03)


def test_bailian_draws_by_its_weights() -> None:
    """Hits 0, 2/3, 1; batch 1, 8/9, 0; tokens 0, 160 + 100, 800 + 10, so 1, 1 - 26/81, 0."""
    weights = [0.3, 0.7 * 2 / 3 + 0.15 * 8 / 9 + 0.15 * 55 / 81, 0.7]
    assert Bailian().weights(make_request(PROMPT_TOKENS), case()).tolist() == pytest.approx(weights)
    expected = {name: weight / sum(weights) for name, weight in zip("abc", weights, strict=True)}
    assert shares("bailian", case()) == pytest.approx(expected, abs=0.03)

    alike = make_snapshot(PROMPT_TOKENS, hit_tokens=[0, 0])
    assert Bailian().weights(make_request(PROMPT_TOKENS), alike).tolist() == pytest.approx(
        [0.3] * 2
    )
    # Worst in everything: never by weight, and the score is a number all the same.
    worst = case(hit_tokens=[96, 96, 0])
    assert shares("bailian", worst, 500).keys() == {"a", "b"}


def test_a_session_stays_until_its_instance_is_above_the_ceiling() -> None:
    """11 requests on two instances: the ceiling is ceil(1.25 x 12 / 2) = 8."""
    policy, names = POLICIES["session_affinity"], ["a", "b"]
    even = make_snapshot(100, hit_tokens=[0, 96], batch_size=[7, 4], names=names)
    uneven = make_snapshot(100, hit_tokens=[0, 96], batch_size=[9, 2], names=names)
    homes = {}
    for i in range(40):
        session = make_request(100, session_id=f"s{i}")
        homes[i] = winner(policy, session, even)
        assert sorted(policy(session, even)) == [0, 1]
        again = replace(session, request_id=f"another {i}", turn=1)
        assert winner(policy, again, even) == homes[i]
        assert winner(policy, session, uneven) == "b"
        assert policy(session, uneven)[0] == 2 + 9
    assert set(homes.values()) == set(names)


def test_who_leaves_moves_its_own_sessions_only() -> None:
    """The rendezvous hash needs no table to keep everybody else where they are."""
    fleet = make_snapshot(100, hit_tokens=[0] * 5)
    policy = POLICIES["session_affinity"]
    smaller = without(fleet, {fleet.instances[2].instance_id})
    for i in range(60):
        session = make_request(100, session_id=f"s{i}")
        home = winner(policy, session, fleet)
        if home != "c":
            assert winner(policy, session, smaller) == home
