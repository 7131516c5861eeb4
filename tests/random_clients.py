"""Requests of one router as clients make them: of all kinds, cancelled, ended at any time."""

import asyncio
import contextlib
from collections import Counter

import numpy as np
from builders import make_request
from decision_core import RouterCore
from fault_link import pick

from indexer.contract.identifiers import BlockHash
from router.eligibility import eligible_snapshot
from router.errors import IndexUnavailable, RouterError
from router.policies import POLICIES
from router.snapshot import Booking

BLOCKS = [BlockHash(bytes([n]) * 8) for n in range(1, 5)]
PROMPTS = [list(range(n * 1000, n * 1000 + length)) for n, length in enumerate((40, 100, 400))]


class Clients:
    """Requests of one router, of all kinds; they end when told to."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.ended = asyncio.Event()
        self.counts: Counter[str] = Counter()

    async def run(self, core: RouterCore) -> None:
        """One request after the other."""
        while not self.ended.is_set():
            await self._pause(0.05)
            booking = await self._book(core)
            if booking is not None:
                await self._live(core, booking)

    async def _pause(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0, longest_s)):
                await self.ended.wait()

    async def _book(self, core: RouterCore) -> Booking | None:
        """As a router does it, for a client that may go away meanwhile."""
        task = asyncio.ensure_future(_decide(core, self._rng))
        if self._rng.random() < 0.2:
            self.counts["left"] += 1
            await asyncio.sleep(pick(self._rng, [0, 0, 0.001, 0.003, 0.05]))
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            pass  # also when this client's own task is to end: it does, at the next look
        except RouterError:
            self.counts["refused"] += 1
        return None

    async def _live(self, core: RouterCore, booking: Booking) -> None:
        ledger, rng = core.ledger, self._rng
        self.counts["booked"] += 1
        if rng.random() < 0.4:
            ledger.awaits(booking, pick(rng, BLOCKS))
        await self._pause(0.2)
        if rng.random() < 0.6:
            for _ in range(pick(rng, [1, 1, 2])):
                ledger.prefilled(booking)
            await self._pause(0.3)
        for _ in range(pick(rng, [1, 1, 2])):
            ledger.release(booking)


async def _decide(core: RouterCore, rng: np.random.Generator) -> Booking | None:
    prompt = pick(rng, PROMPTS)
    policy = pick(rng, ["lmetric", "lmetric", "least_loaded"])
    if await core.index.find("m") is None:
        return None
    try:
        return (await core.decide(policy, prompt=prompt))[1]
    except IndexUnavailable:  # Redis learns of it later
        served = await core.index.find("m")
        if served is None:
            return None
        snapshot = eligible_snapshot(core.index.last_sighting(served), len(prompt))
        return core.ledger.reserve_alone(POLICIES[policy], make_request(len(prompt)), snapshot)[1]
