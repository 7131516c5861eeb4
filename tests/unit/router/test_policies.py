"""Each policy's formula on cases computed by hand."""

import pytest
from builders import make_request, make_snapshot

from router.decide import rank
from router.policies import POLICIES, policy_by_name

# Three instances, a prompt of 100 tokens:
#              a        b        c
# hits         0       64       96
# queued       0      100       10
# batch        0        1        9
# running      0        1        4
# waiting      0        0        2      (3 of c's batch are not reported yet)
CASE = make_snapshot(
    100,
    hit_tokens=[0, 64, 96],
    queued_prefill_tokens=[0, 100, 10],
    batch_size=[0, 1, 9],
    running_count=[0, 1, 4],
    waiting_count=[0, 0, 2],
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lmetric", [100 * 1, 136 * 2, 14 * 10]),
        ("least_loaded", [0, 1, 9]),
        ("vllm_v1", [0, 1, 4 * (2 + 3) + 4]),
        ("max_hit", [100.0, 36.1, 4.9]),
        # ceil(1.25 x 11 / 3) = 5: c would have 10 requests, so it comes after everybody.
        ("max_hit_bounded", [100.0, 36.1, 101 + 9]),
    ],
)
def test_a_policy_gives_its_formula(name: str, expected: list[float]) -> None:
    """Scores are the formula of the docstring."""
    assert expected == pytest.approx(policy_by_name(name)(make_request(100), CASE).tolist())


@pytest.mark.parametrize(("sequence", "expected"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 1)])
def test_round_robin_takes_turns(sequence: int, expected: int) -> None:
    """The request's number modulo the fleet says whose turn it is."""
    scores = policy_by_name("round_robin")(make_request(sequence=sequence), CASE)
    assert expected == int(scores.argmin())


def test_every_instance_above_the_ceiling_means_least_loaded() -> None:
    """When all exceed the ceiling the smallest batch wins, whatever it holds."""
    fleet = make_snapshot(100, hit_tokens=[0, 96], batch_size=[50, 50])
    scores = policy_by_name("max_hit_bounded")(make_request(100), fleet)
    assert scores.argmin() == 1  # 51 is not above ceil(1.25 x 101 / 2) = 64


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    """The error helps whoever mistyped."""
    with pytest.raises(ValueError, match=r"unknown policy `lmetrik`; known policies: .*lmetric"):
        policy_by_name("lmetrik")


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"lmetric_artifact"}))
def test_equals_are_drawn_not_listed(name: str) -> None:
    """Among equal instances the request decides, and over many requests all get some."""
    fleet = make_snapshot(100, hit_tokens=[0] * 4)
    chosen = set()
    for i in range(64):
        request = make_request(100, request_id=f"r{i}", sequence=i)
        chosen.add(int(rank(POLICIES[name](request, fleet), request, fleet, 1)[0]))
    assert chosen == {0, 1, 2, 3}
