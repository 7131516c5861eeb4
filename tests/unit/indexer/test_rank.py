"""What a rank makes of a lease that it could not renew."""

from typing import Any, cast

import pytest
from builders import make_fleet_record, make_instance
from prometheus_client import CollectorRegistry

from indexer import rank as ranks
from indexer.contract.limits import INSTANCE_LEASE_TTL_S
from indexer.contract.records import EngineCounters, HeartbeatReply, TooLate
from indexer.draining import Drain
from indexer.engine.engine_metrics import EngineSample
from indexer.engine.event_source import EventSource
from indexer.plan import RankPlan
from indexer.rank import Rank
from indexer.table.changes import Delta
from indexer.telemetry import Telemetry

BEAT_S = 0.5


ANSWER = HeartbeatReply(
    reserved_requests=0,
    reserved_prefill_tokens=0,
    budget_blocks=None,
    now_s=1000.0,
    notices=(),
)

IDLE = EngineSample(
    counters=EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0),
    sleep_level=None,
    started_s=1.0,
)
"""An engine that does nothing."""


class Redis:
    """In place of a publisher: its Redis answers if it has an answer.

    Attributes:
        answer: to every heartbeat; None: Redis is down.
        stale: what the publisher says of removals.
        beats_count: heartbeats sent.
    """

    instance_id = "i"
    slot, generation = 0, 1

    def __init__(self, answer: HeartbeatReply | TooLate | None = None) -> None:
        self.answer = answer
        self.is_stale = False
        self.beats_count = 0
        self.known_s: list[float | None] = []

    @property
    def membership(self) -> "Redis":
        """Itself."""
        return self

    def expect_removals(self) -> None:
        """What was answered has taken something back, which is not written yet."""
        self.is_stale = True

    async def heartbeat(self, *args: Any) -> HeartbeatReply | TooLate:
        """Answered, or nobody is there."""
        if self.answer is None:
            raise ConnectionError("down")
        self.beats_count += 1
        self.known_s.append(args[-1])
        return self.answer

    def offer(self, _: list[Delta], __: float | None) -> None:
        """Nothing is published."""


class Events:
    """In place of a follower.

    Attributes:
        is_sure: as a test decides.
        checks_count: how often it was asked to make sure.
    """

    def __init__(self, holdings: Any) -> None:
        self.holdings = holdings
        self.is_sure = True
        self.checks_count = 0

    def check(self) -> None:
        """Nothing is sure until it is answered."""
        self.checks_count += 1
        self.is_sure = False


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that goes on while a process stands still."""
    now_s = [0.0]
    monkeypatch.setattr(ranks.time, "clock_gettime", lambda _: now_s[0])
    return now_s


def make_rank(redis: Redis, registry: CollectorRegistry, *, learned: bool) -> Rank:
    """A rank of no engine."""
    return Rank(
        RankPlan(
            source=EventSource(rank=0, endpoint="", replay_endpoint=None, topic=None),
            record=make_instance(learned=learned),
        ),
        cast("Any", redis),
        make_fleet_record(),
        Telemetry(registry),
        None,
        drain=Drain(is_draining=False),
        learned_blocks_max=lambda: 100,
    )


def late_renewals(registry: CollectorRegistry) -> float | None:
    """Leases that ended."""
    return registry.get_sample_value("timestable_indexer_late_renewals_total", {"rank": "0"})


async def test_a_lease_that_ends_is_told_once_for_each_time_it_would_have(
    clock_s: list[float],
) -> None:
    """However often the engine is looked at while Redis is away; no events are followed there."""
    registry = CollectorRegistry()
    rank = make_rank(Redis(), registry, learned=True)
    while clock_s[0] <= 3 * (INSTANCE_LEASE_TTL_S + BEAT_S):
        await rank.heartbeat(IDLE, clock_s[0])
        clock_s[0] += BEAT_S
    assert late_renewals(registry) == 3


async def test_an_answer_from_before_a_pause_is_not_relied_on(clock_s: list[float]) -> None:
    """A replay was under way when the process stood still: the ring is asked again behind it."""
    redis, registry = Redis(ANSWER), CollectorRegistry()
    rank = make_rank(redis, registry, learned=False)
    events = rank.follower = cast("Any", Events(rank.follower.holdings))
    events.is_sure = False
    await rank.heartbeat(IDLE, 0.0)
    clock_s[0] += INSTANCE_LEASE_TTL_S + 1  # stands still
    await rank.heartbeat(IDLE, 0.0)
    assert (events.checks_count, redis.beats_count) == (1, 0)
    events.is_sure = True
    await rank.heartbeat(IDLE, 0.0)
    assert redis.beats_count == 0, "removals are not written yet"
    redis.is_stale = False
    await rank.heartbeat(IDLE, 0.0)
    assert redis.beats_count == 1


async def test_a_heartbeat_that_came_too_late_has_the_ring_asked(clock_s: list[float]) -> None:
    """The process stood still with a heartbeat on its way; the clock of Redis is learnt anew."""
    redis, registry = Redis(ANSWER), CollectorRegistry()
    rank = make_rank(redis, registry, learned=False)
    events = rank.follower = cast("Any", Events(rank.follower.holdings))
    await rank.heartbeat(IDLE, 0.0)
    clock_s[0] += 1.0
    redis.answer = TooLate(now_s=ANSWER.now_s + 9.0)
    rank.stop_renewing()  # makes the next one due
    events.is_sure, redis.is_stale = True, False
    for _ in range(2):
        await rank.heartbeat(IDLE, 0.0)
        redis.is_stale = False
    assert redis.known_s == [None, ANSWER.now_s + 1.0]
    assert (late_renewals(registry), events.is_sure) == (1, False)
    events.is_sure, redis.answer = True, ANSWER
    for _ in range(2):
        await rank.heartbeat(IDLE, 0.0)
        redis.is_stale = False
    assert redis.known_s[2:] == [ANSWER.now_s + 9.0]
