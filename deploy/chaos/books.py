"""Whether the books balance: sampled under load, and exactly zero after it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.errors import NotRecoveredError
from deploy.demo.fleet_state import FleetState
from indexer.contract import audit, functions, keys
from indexer.contract.audit import Audit
from indexer.contract.link import Link, connected

SAMPLE_S = 1.0
CALL_DEADLINE_S = 1.0
AWAY = (RedisError, OSError, TimeoutError)
"""Redis is part of what is being broken."""


@dataclass(slots=True, kw_only=True)
class Books:
    """Looks at Redis itself, past the proxy.

    Attributes:
        differences_max: most slots that differed in one look since `begin`.
        samples: looks that were answered since `begin`.
    """

    fleet: ChaosFleet
    link: Link
    state: FleetState
    differences_max: int = 0
    samples: int = 0
    _clamped_before: int = 0
    _told: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        """Start counting for another fault."""
        self.differences_max = self.samples = 0
        self._told.clear()
        self._clamped_before = (await self._audit()).clamped_count

    async def _audit(self) -> Audit:
        fleet = keys.fleet_id(self.fleet.local.config.model_name)
        return audit.audited(await functions.run(self.link, audit.audit(fleet)))

    async def sample(self) -> None:
        """Look about once a second until cancelled; Redis may be away."""
        while True:
            try:
                seen = await self._audit()
            except AWAY:
                pass
            else:
                self.samples += 1
                self._clamped_before = min(self._clamped_before, seen.clamped_count)
                self.differences_max = max(self.differences_max, len(seen.differences))
                self._told += [str(one) for one in seen.differences][:5]
            await asyncio.sleep(SAMPLE_S)

    @property
    def differences(self) -> list[str]:
        """The first differences that were seen, for a person."""
        return self._told[:10]

    async def _not_zero(self) -> str | None:
        try:
            left = await self.state.nonzero_counters()
            if left:
                return f"counters are not zero: {left}"
            seen = await self._audit()
            clamped = seen.clamped_count - min(self._clamped_before, seen.clamped_count)
            if seen.differences or seen.reservations or clamped:
                return (
                    f"{seen.reservations} reservations are left, {clamped} were taken back twice, "
                    f"differences: {seen.differences}"
                )
            fleet = keys.fleet_id(self.fleet.local.config.model_name)
            leftovers = await audit.leftovers(self.link, [fleet])
        except AWAY as error:
            return f"Redis does not answer: {error!r}"
        return f"left over: {leftovers}" if leftovers else None

    async def wait_zero(self, deadline_s: float) -> str | None:
        """What is not zero after the deadline; None when everything is."""
        try:
            await self.fleet.wait(self._not_zero, deadline_s)
        except NotRecoveredError as error:
            return str(error)
        return None


@asynccontextmanager
async def opened(fleet: ChaosFleet) -> AsyncIterator[Books]:
    """Books with connections of their own."""
    url = fleet.local.layout.redis_url
    async with connected(url, deadline_s=CALL_DEADLINE_S) as link:
        state = FleetState(
            redis=link,
            session=fleet.session,
            model_name=fleet.local.config.model_name,
            engine_urls=[worker.engine_url for worker in fleet.local.layout.workers],
        )
        yield Books(fleet=fleet, link=link, state=state)
