"""Redis gone, slow, or empty."""

from typing import ClassVar

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.faults.base import FaultCase, Target
from indexer.contract.link import connected

SLOW_BY_S = 0.3
CALL_DEADLINE_S = 5.0


class RedisRestart(FaultCase):
    """Redis is killed and comes back empty; nothing may fail."""

    name = "redis-restart"
    target = Target.REDIS
    hold_s = 3.0

    async def inject(self, fleet: ChaosFleet) -> None:
        """Kill it."""
        await fleet.local.redis.killed()

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.local.redis)


class RedisOutage(RedisRestart):
    """The same for half a minute."""

    name = "redis-outage-30-s"
    hold_s = 30.0


class RedisPause(FaultCase):
    """Redis stands still with its connections open."""

    name = "redis-pause"
    target = Target.REDIS
    hold_s = 5.0

    async def inject(self, fleet: ChaosFleet) -> None:
        """Let it stand still."""
        fleet.local.redis.pause()

    async def end(self, fleet: ChaosFleet) -> None:
        """Let it go on."""
        fleet.local.redis.resume()


class RedisSlow(FaultCase):
    """Every answer of Redis comes late, beyond the routers' deadline."""

    name = "redis-slow"
    target = Target.REDIS
    hold_s = 8.0

    async def inject(self, fleet: ChaosFleet) -> None:
        """Delay it."""
        fleet.redis_way.delay_s = SLOW_BY_S

    async def end(self, fleet: ChaosFleet) -> None:
        """Let it through at once."""
        fleet.redis_way.delay_s = 0.0


class _Command(FaultCase):
    """Somebody gives Redis a command that empties something."""

    target = Target.REDIS
    command: ClassVar[tuple[str, ...]]

    async def inject(self, fleet: ChaosFleet) -> None:
        """Give it."""
        async with connected(fleet.local.layout.redis_url, deadline_s=CALL_DEADLINE_S) as link:
            await link.execute_command(*self.command)


class FlushAll(_Command):
    """All keys are gone."""

    name = "redis-flushall"
    command = ("FLUSHALL",)


class FunctionFlush(_Command):
    """All functions are gone."""

    name = "redis-function-flush"
    command = ("FUNCTION", "FLUSH")


CASES = (RedisRestart, RedisOutage, RedisPause, RedisSlow, FlushAll, FunctionFlush)
