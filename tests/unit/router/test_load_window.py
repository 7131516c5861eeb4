"""What Preble remembers: exact over its window, bounded, and one router's own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from builders import make_request, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from router.decide import decide, rank
from router.policies import POLICIES, router_policies
from router.policies.base import Remembering, tell_decided, tell_ended
from router.policies.load_window import DECODE_S, WINDOW_S, LoadWindow
from router.snapshot import Decision, FleetSnapshot

RATE = 1000.0


def a_fleet(prompt_tokens: int, hit_tokens: list[int]) -> FleetSnapshot:
    """Instances a, b, c... that prefill 1,000 tokens a second; by a clock that stands still."""
    fleet = make_snapshot(prompt_tokens, hit_tokens=hit_tokens)
    instances = tuple(replace(one, prefill_tokens_per_s=RATE) for one in fleet.instances)
    return replace(fleet, instances=instances)


class Clock:
    """Seconds that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def decided(place: int, new_tokens: int) -> Decision:
    """So many new tokens go to an instance of three."""
    request = make_request(new_tokens)
    return decide(POLICIES["preble"], request, a_fleet(new_tokens, [0] * 3), place=place)


def test_preble_scores_by_what_its_router_has_sent() -> None:
    """Requests break ties of the longest match; otherwise the least seconds of work win.

    a has had 100 and 500 tokens, 0.6 s, and answers of 2 s and 4 s; b 1,000 tokens, 1 s, and an
    answer that goes on, so 3 s as the mean of the others; c nothing.
    """
    clock = Clock()
    mine, others = (router_policies(clock)["preble"] for _ in range(2))
    sent = [(0, 100, 2.0), (0, 500, 4.0), (1, 1000, None)]
    for number, (place, tokens, decode_s) in enumerate(sent):
        request, decision = make_request(tokens, sequence=number), decided(place, tokens)
        tell_decided(mine, request, decision)
        tell_ended(mine, request, decision, decode_s)
        tell_ended(mine, request, decision, None)  # heard twice, as when a stream is released

    request = make_request(100)
    exploring = a_fleet(100, [48, 0, 0])
    assert mine(request, exploring).tolist() == pytest.approx([0.6 + 6, 1 + 3, 0])
    matching = a_fleet(100, [64, 64, 0])
    assert mine(request, matching).tolist() == pytest.approx([36 + 2 / 3, 36 + 1 / 3, 100])
    assert rank(mine(request, matching), request, matching, 1)[0] == 1

    assert others(request, exploring).tolist() == [0, 0, 0]
    assert POLICIES["preble"](request, exploring).tolist() == [0, 0, 0]
    clock.now_s = WINDOW_S
    assert mine(request, a_fleet(100, [0, 0, 0])).tolist() == [0, 0, 0]


def test_until_an_answer_has_ended_its_length_is_a_guess() -> None:
    """45 tokens of 150 ms."""
    window = LoadWindow(Clock())
    window.decided(make_request(2000), decided(2, 2000))
    counts, costs_s = window.loads(a_fleet(100, [0] * 3).instances)
    assert counts.tolist() == [0, 0, 1]
    assert costs_s.tolist() == pytest.approx([0, 0, 2 + DECODE_S])


def test_the_window_is_bounded() -> None:
    """Of more decisions than it may hold the oldest are forgotten."""
    window = LoadWindow(Clock(), entries_max=10)
    for number in range(25):
        window.decided(make_request(16, sequence=number), decided(int(number < 20), 16))
    assert len(window) == 10
    counts, _ = window.loads(a_fleet(100, [0] * 3).instances)
    assert counts.tolist() == [5, 5, 0]


STEPS = st.lists(
    st.tuples(
        st.floats(0, 100),  # seconds passed
        st.integers(0, 8),  # request
        st.integers(0, 2),  # instance
        st.integers(1, 5000),  # new tokens
        st.none() | st.floats(0, 50),  # decode time that its end tells
    ),
    max_size=40,
)


@dataclass
class Naive:
    """A decision, kept for good."""

    decided_s: float
    place: int
    prefill_s: float
    decode_s: float | None = None


@given(steps=STEPS)
def test_the_window_equals_adding_everything_up(
    steps: list[tuple[float, int, int, int, float | None]],
) -> None:
    """Repeats, late and unknown ends included, at any time; nothing of rounding stays behind."""
    clock = Clock()
    window, naive = LoadWindow(clock), dict[tuple[int, int], Naive]()
    for passed_s, number, place, tokens, decode_s in steps:
        clock.now_s = now_s = clock.now_s + passed_s
        naive = {k: v for k, v in naive.items() if v.decided_s > now_s - WINDOW_S}
        window.loads(())
        request, decision = make_request(sequence=number), decided(place, tokens)
        window.decided(request, decision)
        window.ended(request, decision, decode_s)
        entry = naive.setdefault((number, place), Naive(now_s, place, tokens / RATE))
        entry.decode_s = decode_s if entry.decode_s is None else entry.decode_s

        counts, costs_s = window.loads(decision.snapshot.instances)
        known = [one.decode_s for one in naive.values() if one.decode_s is not None]
        guess_s = float(np.mean(known)) if known else DECODE_S
        for i in range(3):
            there = [one for one in naive.values() if one.place == i]
            decode = [guess_s if one.decode_s is None else one.decode_s for one in there]
            assert counts[i] == len(there)
            expected_s = sum(one.prefill_s for one in there) + sum(decode)
            assert costs_s[i] == pytest.approx(expected_s, abs=1e-6)
    clock.now_s += WINDOW_S + 1
    counts, costs_s = window.loads(a_fleet(100, [0] * 3).instances)
    assert (counts.tolist(), costs_s.tolist(), len(window)) == ([0] * 3, [0.0] * 3, 0)


def test_a_request_is_not_known_by_the_id_that_its_client_chose() -> None:
    """Fifty requests of one id are fifty."""
    window = LoadWindow(Clock())
    for number in range(50):
        window.decided(make_request(16, request_id="same", sequence=number), decided(0, 16))
    counts, _ = window.loads(a_fleet(100, [0] * 3).instances)
    assert counts.tolist() == [50, 0, 0]


@pytest.mark.parametrize("step_s", [0.0, 1.0, -9.0])
def test_the_window_does_not_go_by_the_time_of_snapshots(step_s: float) -> None:
    """That stands still while degraded and follows steps of the wall clock."""
    clock = Clock()
    policy = router_policies(clock)["preble"]
    assert isinstance(policy, Remembering)
    request, fleet = make_request(1000), a_fleet(1000, [0] * 3)
    for number in range(400):
        clock.now_s = float(number)
        decision = replace(
            decided(0, 1000), snapshot=replace(fleet, taken_s=5000 + number * step_s)
        )
        tell_decided(policy, make_request(1000, sequence=number), decision)
    scores = policy(request, replace(fleet, taken_s=5000 + 400 * step_s))
    assert scores.tolist() == pytest.approx([WINDOW_S * (1 + DECODE_S), 0, 0])


def test_only_rules_that_remember_have_a_memory() -> None:
    """The other policies are the very same objects for every router."""
    policies = router_policies(Clock())
    own = {name for name, policy in policies.items() if policy is not POLICIES[name]}
    assert own == {"preble"}
    assert {name for name, policy in policies.items() if isinstance(policy, Remembering)} == own
