"""What a rank makes of a lease that it could not renew."""

from typing import Any, cast

import pytest
from builders import make_fleet_record, make_instance
from prometheus_client import CollectorRegistry

from indexer import rank as ranks
from indexer.contract.limits import INSTANCE_LEASE_TTL_S
from indexer.contract.records import EngineCounters
from indexer.draining import Drain
from indexer.engine.engine_metrics import EngineSample
from indexer.engine.event_source import EventSource
from indexer.plan import RankPlan
from indexer.rank import Rank
from indexer.table.changes import Delta
from indexer.telemetry import Telemetry

BEAT_S = 0.5


class Unheard:
    """In place of a publisher whose Redis does not answer."""

    instance_id = "i"

    @property
    def membership(self) -> "Unheard":
        """Itself."""
        return self

    async def heartbeat(self, *_: object) -> None:
        """Nobody takes it."""
        raise ConnectionError("down")

    def offer(self, _: list[Delta], __: float | None) -> None:
        """Nothing is published."""


async def test_a_lease_that_ends_is_told_once_for_each_time_it_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often the engine is looked at while Redis is away; no events are followed there."""
    clock_s = [0.0]
    monkeypatch.setattr(ranks.time, "clock_gettime", lambda _: clock_s[0])
    registry = CollectorRegistry()
    rank = Rank(
        RankPlan(
            source=EventSource(rank=0, endpoint="", replay_endpoint=None, topic=None),
            record=make_instance(learned=True),
        ),
        cast("Any", Unheard()),
        make_fleet_record(),
        Telemetry(registry),
        None,
        drain=Drain(is_draining=False),
        learned_blocks_max=lambda: 100,
    )
    idle = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0)
    sample = EngineSample(counters=idle, sleep_level=None, started_s=1.0)
    while clock_s[0] <= 3 * (INSTANCE_LEASE_TTL_S + BEAT_S):
        await rank.heartbeat(sample, clock_s[0])
        clock_s[0] += BEAT_S
    late = registry.get_sample_value("timestable_indexer_late_renewals_total", {"rank": "0"})
    assert late == 3
