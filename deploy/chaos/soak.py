"""Faults that last at the same time, drawn at random: the soak."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

import aiohttp
import numpy as np

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.config import hold_s
from deploy.chaos.errors import ChaosError, NotRecoveredError
from deploy.chaos.faults.base import FaultCase, Target

START_WITHIN_S: Final = 2.0
"""Faults of a round begin within this, so that each meets the others half done."""


class Overlap(FaultCase):
    """One round: a fault for every target, each beginning at a moment of its own.

    Recovery counts from the end of the last one.

    Args:
        cases: at most one for a target.
        delays_s: when each begins, after the round does.
    """

    hold_s = 0.0  # each has its own

    def __init__(self, cases: Sequence[FaultCase], delays_s: Sequence[float]) -> None:
        targets = [case.target for case in cases]
        assert len(set(targets)) == len(targets), "faults of one target would undo each other"
        self.name = " + ".join(case.name for case in cases)
        self.left_share = next((case.left_share for case in cases if case.left_share), None)
        self._planned = tuple(zip(cases, delays_s, strict=True))

    async def inject(self, fleet: ChaosFleet) -> None:
        """Return when every fault has been taken back.

        Raises:
            NotRecoveredError: some could not be done or taken back; says which and why.
            ExceptionGroup: of anything else; every fault has been taken back all the same.
        """
        async with asyncio.TaskGroup() as tasks:
            each = [tasks.create_task(_one(fleet, *planned)) for planned in self._planned]
        told = [one for one in (task.result() for task in each) if one is not None]
        if told:
            raise NotRecoveredError("; ".join(told))


async def _one(fleet: ChaosFleet, case: FaultCase, delay_s: float) -> str | None:
    """Do a fault from its beginning to its end; what went wrong."""
    await asyncio.sleep(delay_s)
    try:
        try:
            await case.inject(fleet)
            await asyncio.sleep(hold_s(fleet.config) if case.hold_s is None else case.hold_s)
        finally:
            await case.end(fleet)
    except (NotRecoveredError, aiohttp.ClientError, TimeoutError) as error:
        return f"{case.name}: {error!r}"
    return None


def rounds(cases: Sequence[type[FaultCase]], dice: np.random.Generator) -> Iterator[Overlap]:
    """Random rounds without end, of the faults that can be done here.

    Raises:
        ChaosError: none of them can.
    """
    possible = [case for case in cases if case().skip_reason() is None]
    if not possible:
        raise ChaosError("faults: none of them can be done on this machine")
    by_target = {
        target: [case for case in possible if case.target is target]
        for target in Target
        if any(case.target is target for case in possible)
    }
    while True:
        chosen = [of[dice.integers(len(of))]() for of in by_target.values()]
        yield Overlap(chosen, dice.uniform(0, START_WITHIN_S, len(chosen)).tolist())
