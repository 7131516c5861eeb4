"""The constants of prefill are found again in what a router can see of them."""

from dataclasses import replace

import numpy as np
import pytest

from router.prefill_fit import (
    ATTENTION_MAX_S,
    LINEAR_MAX_S,
    LINEAR_MIN_S,
    OBSERVATIONS_MIN,
    REFIT_EVERY,
    WINDOW,
    PrefillFit,
    SeenPrefill,
)
from router.snapshot import PrefillCost

H20 = PrefillCost(linear_s_per_token=4.612e-5, attention_s_per_pair=6.642e-9)
A100 = PrefillCost(linear_s_per_token=7.457e-5, attention_s_per_pair=2.8005e-9)
"""Of the shipped profiles."""


def prefills(
    rng: np.random.Generator,
    cost: PrefillCost,
    *,
    count: int = WINDOW,
    fixed_s: float = 0.03,
    wrong: float = 0.0,
    factors: tuple[float, float] = (1.5, 20),
    slowness: float = 1.0,
) -> list[SeenPrefill]:
    """Of 200 to 60,000 tokens, a tenth of noise; a share of them too long, or too short."""
    seen = []
    for _ in range(count):
        prompt = int(np.exp(rng.uniform(np.log(200), np.log(60_000))))
        new = max(1, int(prompt * rng.choice([1, 0.5, 0.1, 0.02])))
        work_s = cost.linear_s_per_token * new
        work_s += cost.attention_s_per_pair * new * (prompt - new / 2)
        seconds = (fixed_s + work_s * slowness) * float(np.exp(rng.normal(0, 0.1)))
        seconds *= float(rng.uniform(*factors)) if rng.random() < wrong else 1.0
        seen.append(
            SeenPrefill(
                prompt_tokens=prompt,
                new_prefill_tokens=new,
                queued_prefill_tokens=0,
                queued_context_tokens=0,
                seconds=seconds,
                slowness=slowness,
            )
        )
    return seen


def fitted(seen: list[SeenPrefill]) -> PrefillCost:
    """What is made of them."""
    fit = PrefillFit()
    assert all(fit.add(one) for one in seen)
    assert fit.cost is not None
    return fit.cost


def near(cost: PrefillCost, ratio: float) -> PrefillCost:
    """Equal to what is within this of it."""
    return PrefillCost(
        linear_s_per_token=pytest.approx(cost.linear_s_per_token, rel=ratio),
        attention_s_per_pair=pytest.approx(cost.attention_s_per_pair, rel=ratio),
    )


@pytest.mark.parametrize("cost", [H20, A100])
@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_known_constants_are_found_in_noise(cost: PrefillCost, wrong: float) -> None:
    """Within a tenth, even where two fifths waited for something that nobody counted."""
    for seed in range(5):
        seen = prefills(np.random.default_rng(seed), cost, wrong=wrong)
        assert fitted(seen) == near(cost, 0.1), seed


def test_hits_that_nobody_predicted_do_not_make_it_cheap() -> None:
    """A quarter of the prefills took a tenth to a half of what their tokens would: within 1 / 4."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        seen = prefills(rng, H20, wrong=0.25, factors=(0.1, 0.5))
        assert fitted(seen) == near(H20, 0.25), seed


def test_what_every_request_pays_does_not_pass_for_tokens() -> None:
    """Half a second of network in front of each changes neither constant."""
    seen = prefills(np.random.default_rng(1), H20, fixed_s=0.5)
    assert fitted(seen) == near(H20, 0.15)


def test_a_slow_device_tells_of_the_fastest_one() -> None:
    """Prefills of devices that are known to differ are put on one scale."""
    rng = np.random.default_rng(2)
    mixed = prefills(rng, H20, count=WINDOW // 2, fixed_s=0.0)
    mixed += prefills(rng, H20, count=WINDOW // 2, fixed_s=0.0, slowness=3.0)
    assert fitted(mixed) == near(H20, 0.1)


def test_nothing_is_told_before_enough_was_seen_and_the_latest_count() -> None:
    """Until then there is the fallback; a device that has changed is known again."""
    rng, fit = np.random.default_rng(3), PrefillFit()
    for one in prefills(rng, H20, count=OBSERVATIONS_MIN - 1):
        fit.add(one)
    assert fit.cost is None
    fit.add(prefills(rng, H20, count=1)[0])
    assert fit.cost is not None
    for one in prefills(rng, A100, count=WINDOW + REFIT_EVERY):
        fit.add(one)
    assert len(fit) == WINDOW
    assert fit.cost == near(A100, 0.1)


def test_the_fit_is_made_seldom() -> None:
    """It holds up whatever else a router does: soon at first, then twice for each window."""
    rng, fit, made_at = np.random.default_rng(4), PrefillFit(), list[int]()
    for number, one in enumerate(prefills(rng, H20, count=3 * WINDOW), start=1):
        before = fit.cost
        fit.add(one)
        if fit.cost is not before:
            made_at.append(number)
    assert made_at[:2] == [OBSERVATIONS_MIN, 2 * OBSERVATIONS_MIN]
    later = [number for number in made_at if number > WINDOW - REFIT_EVERY]
    assert np.diff(later).tolist() == [REFIT_EVERY] * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"queued_prefill_tokens": 101},  # behind more than a tenth of its own
        {"new_prefill_tokens": 0},
        {"new_prefill_tokens": 2001},
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"seconds": 601.0},
        {"slowness": 0.0},
    ],
)
def test_what_says_nothing_is_left_out(changes: dict[str, float]) -> None:
    """A queue of unknown progress, and what cannot have happened."""
    good = SeenPrefill(
        prompt_tokens=2000,
        new_prefill_tokens=1000,
        queued_prefill_tokens=100,
        queued_context_tokens=500,
        seconds=0.1,
    )
    fit = PrefillFit()
    assert not fit.add(replace(good, **changes))
    assert len(fit) == 0
    assert fit.add(good)


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 599.0])
def test_the_constants_are_bounded(seconds: float) -> None:
    """Prefills all of one length and any duration: finite, and within what is possible."""
    one = SeenPrefill(
        prompt_tokens=10,
        new_prefill_tokens=10,
        queued_prefill_tokens=0,
        queued_context_tokens=0,
        seconds=seconds,
    )
    cost = fitted([one] * OBSERVATIONS_MIN)
    assert LINEAR_MIN_S <= cost.linear_s_per_token <= LINEAR_MAX_S
    assert 0 <= cost.attention_s_per_pair <= ATTENTION_MAX_S
