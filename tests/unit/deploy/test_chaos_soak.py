"""A soak's rounds: what they draw, and that each fault of one is taken back whatever else fails."""

import asyncio
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.config import ChaosConfig
from deploy.chaos.errors import ChaosError, NotRecoveredError
from deploy.chaos.faults import CASES
from deploy.chaos.faults.base import FaultCase, Target
from deploy.chaos.soak import Overlap, rounds


class _Told(FaultCase):
    """Tells what is done to it."""

    name = "told"
    target = Target.REDIS
    hold_s = 0.0

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self.begun = asyncio.Event()

    async def inject(self, _fleet: ChaosFleet) -> None:
        self._told.append("injected")
        self.begun.set()

    async def end(self, _fleet: ChaosFleet) -> None:
        self._told.append("ended")


class _Failing(_Told):
    """Cannot be done."""

    name = "failing"
    target = Target.ROUTERS

    async def inject(self, _fleet: ChaosFleet) -> None:
        raise NotRecoveredError("nobody came")


class _Broken(_Told):
    """Of a harness that ended unexpectedly."""

    name = "broken"
    target = Target.ROUTERS

    async def inject(self, _fleet: ChaosFleet) -> None:
        raise OSError("no such process")


class _Forever(_Told):
    """Lasts until the run is cut short."""

    name = "forever"
    target = Target.INSTANCES
    hold_s = 1e6


class _Impossible(_Told):
    name = "impossible"

    def __init__(self) -> None:
        super().__init__([])

    def skip_reason(self) -> str | None:
        return "not here"


def _fleet() -> ChaosFleet:
    class _Fleet:
        config = ChaosConfig()

    return cast(ChaosFleet, _Fleet())


def _names(seed: int, count: int) -> list[str]:
    return [one.name for one in islice(rounds(CASES, np.random.default_rng(seed)), count)]


def test_a_round_has_one_fault_of_every_target_and_a_seed_gives_the_same_rounds() -> None:
    """So that a soak can be repeated, and no two faults of it undo each other."""
    target_by_name = {case.name: case.target for case in CASES}
    drawn = _names(1, 200)
    for name in drawn:
        assert [target_by_name[one] for one in name.split(" + ")] == list(Target), name
    assert drawn == _names(1, 200) != _names(2, 200)


def test_every_fault_is_drawn_sooner_or_later() -> None:
    """No fault that can be done here is left out of long soaks."""
    possible = {case.name for case in CASES if case().skip_reason() is None}
    assert {name for one in _names(3, 400) for name in one.split(" + ")} == possible


async def test_a_fault_that_cannot_be_done_is_told_and_the_others_are_still_taken_back() -> None:
    """The error names the fault; nothing stays broken because of it."""
    told: list[str] = []
    overlap = Overlap([_Told(told), _Failing(told)], [0.0, 0.0])
    with pytest.raises(NotRecoveredError, match=r"failing: .*nobody came"):
        await overlap.inject(_fleet())
    assert sorted(told) == ["ended", "ended", "injected"]


async def test_a_round_whose_harness_breaks_takes_its_faults_back() -> None:
    """Before anybody learns of it: a process that stays stopped would not even end."""
    told: list[str] = []
    overlap = Overlap([_Forever(told), _Broken(told)], [0.0, 0.0])
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await overlap.inject(_fleet())
    assert sorted(told) == ["ended", "ended", "injected"]


async def test_a_round_that_is_cut_short_takes_its_faults_back() -> None:
    """Ctrl-C leaves no stopped process and no broken proxy."""
    told: list[str] = []
    fault = _Forever(told)
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        round_ = tasks.create_task(Overlap([fault], [0.0]).inject(_fleet()))
        await fault.begun.wait()
        round_.cancel()
    assert told == ["injected", "ended"]


def test_two_faults_of_one_target_are_no_round() -> None:
    """They would undo each other."""
    told: list[Any] = []
    with pytest.raises(AssertionError, match="undo"):
        Overlap([_Told(told), _Told(told)], [0.0, 0.0])


def test_where_no_fault_can_be_done_the_soak_says_so() -> None:
    """Rather than running without any."""
    with pytest.raises(ChaosError, match="none of them"):
        next(rounds([_Impossible], np.random.default_rng(1)))
