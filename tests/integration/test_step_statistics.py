"""An engine that tells its load after each step: what of it routers see, and when."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import zmq
import zmq.asyncio
from engine_stand_in import EngineStandIn
from prometheus_client import CollectorRegistry
from sidecar_run import Probe, metric, running
from waiting import until, until_equal

from indexer.contract.records import EngineCounters
from indexer.engine import step_statistics
from indexer.engine.engine_metrics import EngineSample, RequestTotals
from indexer.engine.step_statistics import newer, parse_step
from indexer.telemetry import Telemetry

SCRAPE_INTERVAL_S = 0.3
"""The longest there may be: what arrives much sooner has not come by a scrape."""


@asynccontextmanager
async def steps_told() -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A socket as the plugin opens it, and its endpoint."""
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.PUB)
        socket.bind("tcp://127.0.0.1:*")
        try:
            yield socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        finally:
            socket.close(linger=0)


def step(
    running_count: int,
    waiting_count: int = 0,
    *,
    first: int = 0,
    ended: int = 0,
    started_s: float | None = None,
) -> bytes:
    """A message of rank 0."""
    told = [2, 0, running_count, waiting_count, 0.5, None, first, ended, 100, started_s]
    return bytes(msgpack.packb(told))


def sample(first: int | None, ended: int = 0) -> EngineSample:
    """What the metrics show: nothing runs."""
    totals = None if first is None else RequestTotals(first_tokens_count=first, ended_count=ended)
    counters = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0)
    return EngineSample(counters=counters, sleep_level=1, totals=totals, started_s=5.0)


@pytest.mark.integration
async def test_load_arrives_with_the_step(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters follow each step, and not the next scrape; unreadable messages change nothing.

    Once the engine tells no more, its metrics are right again.
    """
    monkeypatch.setattr(step_statistics, "SCRAPE_S", 1.5)
    engine = EngineStandIn()

    async def load() -> list[int]:
        counters = await probe.counters()
        row = counters.slots[0] if counters is not None and len(counters.slots) else None
        return [] if row is None else [int(row["running_count"]), int(row["waiting_count"])]

    async with steps_told() as (socket, endpoint), engine:
        options = {"step_endpoint": endpoint, "scrape_interval_s": SCRAPE_INTERVAL_S}
        async with running(engine, redis_socket, **options) as metrics:
            await until_equal([0, 0], load)

            async def shows(count: int) -> bool:
                """Told again each time: a scrape that comes between is believed."""
                await socket.send(b"\xc1 not a step")
                await socket.send(step(count, count))
                return await load() == [count, count]

            await until(lambda: shows(1), "the first steps are heard")
            delays_s = []
            for number in range(2, 8):
                begun_s = time.monotonic()
                await until(lambda number=number: shows(number), f"step {number} is heard")
                delays_s.append(time.monotonic() - begun_s)
            assert sorted(delays_s)[1] < SCRAPE_INTERVAL_S / 2, delays_s
            assert metric(metrics, "steps_malformed_total") > 0
            assert metric(metrics, "steps_total") >= 7
            await until_equal([0, 0], load)


@pytest.mark.parametrize(
    ("scraped", "told", "heard_s", "is_step"),
    [
        (sample(3, 2), step(9, first=4, ended=2), 4.5, True),  # it has counted more
        (sample(3, 2), step(9, first=4, ended=2), 1.0, False),  # but has not been heard since
        (sample(3, 2), step(9, first=3, ended=1), 9.0, False),  # a step that came late
        (sample(3, 2), step(9, first=3, ended=2), 9.0, True),  # the same moment, heard after
        (sample(3, 2), step(9, first=3, ended=2), 4.5, False),  # the same moment, heard before
        (sample(None), step(9), 9.0, True),
        (sample(None), step(9), 4.5, False),
        (sample(9, 9), step(1), 9.0, False),  # a new process; its metrics are asked soon
    ],
)
def test_the_newer_is_believed(
    scraped: EngineSample, told: bytes, heard_s: float, is_step: bool
) -> None:
    """Whichever way it came; what steps do not tell stays as the metrics show it."""
    known = newer(scraped, 5.0, parse_step(told, heard_s))
    assert (known != scraped) == is_step
    assert known.started_s == 5.0
    assert known.sleep_level == (None if is_step else 1)
    if is_step:
        assert known.counters == parse_step(told, 0.0).counters


@pytest.mark.parametrize(
    "told",
    [
        [1, 0, 1, 1, 0.5, None, 0, 0, 0, 5.0],
        [2, 0, 1, 1, 0.5, None, 0, 0, 0],
        [2, 0, 1, 1, 0.5, "deep", 0, 0, 0, 5.0],
        [2, 0, -1, 1, 0.5, None, 0, 0, 0, 5.0],
        [2, 0, True, 1, 0.5, None, 0, 0, 0, 5.0],
        [2, 1 << 40, 1, 1, 0.5, None, 0, 0, 0, 5.0],
        [2, 0, 1, 1, float("nan"), None, 0, 0, 0, 5.0],
        [2, 0, 1, 1, 0.5, None, 0, 0, 0, "now"],
        [2, 0, 1, 1, 0.5, None, 0, 0, 0, float("nan")],
        [2, 0, 1, 1, 0.5, None, 0, 0, 0, True],
        [2, 0, 1, 1, 0.5, "", 0, 0, 0, 5.0],
        [2, 0, 1, 1, 0.5, False, 0, 0, 0, 5.0],
        [2, 0, 1 << 40, 1, 0.5, None, 0, 0, 0, 5.0],
        [2, 0, 1, (1 << 64) - 1, 0.5, None, 0, 0, 0, 5.0],
        {"running": 1},
        7,
    ],
)
def test_unreadable_steps_are_refused(told: object) -> None:
    """Another version, too little, no counts."""
    with pytest.raises(ValueError, match=r"[a-z]"):
        parse_step(msgpack.packb(told), 0.0)


async def test_metrics_are_asked_each_time_once_no_steps_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without the plugin, which may have died; and what it told last is believed no more."""
    now_s = 100.0
    monkeypatch.setattr(step_statistics, "time", SimpleNamespace(monotonic=lambda: now_s))
    steps = step_statistics.StepStatistics("tcp://127.0.0.1:1", Telemetry(CollectorRegistry()))

    class Metrics:
        asked = 0

        async def samples(self) -> dict[str, EngineSample]:
            self.asked += 1
            return {"0": sample(1)}

    async def running_count() -> int:
        return (await steps.samples(metrics))["0"].counters.running_count

    metrics = Metrics()
    assert [await running_count() for _ in range(3)] == [0, 0, 0]
    assert metrics.asked == 3
    steps._hear(step(1, first=2))
    assert [await running_count() for _ in range(3)] == [1, 1, 1]
    assert metrics.asked == 3
    now_s += 1.1 * step_statistics.SCRAPE_S
    assert [await running_count() for _ in range(3)] == [0, 0, 0]
    assert metrics.asked == 6


async def test_steps_of_another_process_are_dropped() -> None:
    """A second engine with the first one's endpoint, and the engine that was here before.

    Heard before the metrics were first asked, or after; they neither change what is known, nor make
    the metrics be asked more rarely, nor wake anybody.
    """
    telemetry = Telemetry(CollectorRegistry())
    steps = step_statistics.StepStatistics("tcp://127.0.0.1:1", telemetry)

    class Metrics:
        asked = 0

        async def samples(self) -> dict[str, EngineSample]:
            self.asked += 1
            return {"0": sample(1)}

    metrics = Metrics()

    async def running_count() -> int:
        return (await steps.samples(metrics))["0"].counters.running_count

    steps._hear(step(7, first=9, started_s=4.0))
    assert await running_count() == 0
    steps._hear(step(7, first=9, started_s=4.0))
    assert not steps._changed.is_set()
    assert await running_count() == 0
    assert metrics.asked == 2
    assert telemetry.steps_foreign._value.get() == 1
    steps._hear(step(7, first=9, started_s=5.0))  # as the metrics tell it
    assert await running_count() == 7
    assert metrics.asked == 2


async def test_a_pause_ends_with_a_step() -> None:
    """But bursts of steps cause no more looks than one each PACE_S."""
    steps = step_statistics.StepStatistics("tcp://127.0.0.1:1", Telemetry(CollectorRegistry()))
    begun_s = time.monotonic()
    steps._hear(step(1))
    async with asyncio.timeout(5.0):
        await steps.pause(60.0)
    assert time.monotonic() - begun_s >= step_statistics.PACE_S
