"""Processes killed under real engines and started again; the engine last, it takes a minute."""

import asyncio
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import until, until_equal

from tests.vllm.asking import Asked, Asker, traffic
from tests.vllm.cases import Report
from tests.vllm.fleet import RealFleet, Worker
from tests.vllm.prompts import Prompts
from tests.vllm.settings import BLOCK, LEASE_S, READY_S, RING_BATCHES
from tests.vllm.truth import Truth

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900, func_only=True),
]

DEADLINE_S = 60.0
"""For a recovery; the bounds are what is asserted."""

PACE_S = 0.5
"""Between two requests while an engine starts: traffic that leaves it a processor."""

LONG_STREAM = {"max_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def truth(fleet: RealFleet) -> Truth:
    """Index against engine."""
    return Truth(fleet=fleet)


async def known_at(truth: Truth, worker: Worker, prompts: Prompts, count: int) -> list[list[int]]:
    """Let a worker compute prompts of 3 blocks; return them when the index knows the last."""
    known = [prompts.blocks(3) for _ in range(count)]
    for prompt in known:
        await truth.fill(worker, prompt)
    await until_equal(3 * BLOCK, partial(truth.predicted, worker, known[-1]))
    return known


async def restarted_sidecar(
    truth: Truth, worker: Worker, asker: Asker, prompts: Prompts, known: list[list[int]]
) -> float:
    """Kill a sidecar, start it again; seconds until its new instance is right.

    Requests go on meanwhile. The dead one's lease may credit what it last knew for 5 s.
    """
    before = await truth.instance_id(worker)
    assert worker.sidecar is not None
    worker.signal_sidecar(signal.SIGKILL)
    await worker.start_sidecar()
    since_s = time.time()

    async def is_new() -> bool:
        await traffic(asker, prompts, known[:1], 1)
        return await truth.instance_id(worker) not in {None, before}

    await until(is_new, f"sidecar {worker.name} is back alone", DEADLINE_S)
    return await truth.right_again(worker, known, since_s, DEADLINE_S)


async def test_sidecar_killed_with_all_in_the_ring(
    truth: Truth, asker: Asker, report: Report
) -> None:
    """The ring holds every batch: the new sidecar's table is whole."""
    worker, prompts = truth.fleet.workers["a"], Prompts(31)
    known = await known_at(truth, worker, prompts, 6)
    recovery_s = await restarted_sidecar(truth, worker, asker, prompts, known)
    during = list(asker.asked)
    await traffic(asker, prompts, known, 3)
    await report.judge(
        "sidecar killed, ring covers",
        asker.asked[len(during) :],
        during=during,
        recovery_s=recovery_s,
        bound_s=LEASE_S + 5.0,
    )


async def test_sidecar_killed_with_a_checkpoint(truth: Truth, asker: Asker, report: Report) -> None:
    """The ring has wrapped, the checkpoint and the ring together hold everything."""
    worker, prompts = truth.fleet.workers["b"], Prompts(32)
    assert worker.checkpoint_path is not None
    for _ in range(RING_BATCHES + 5):
        await truth.fill(worker, prompts.blocks(1))
    known = await known_at(truth, worker, prompts, 4)
    written_s = time.time()
    await until(
        lambda: _newest_s(worker.checkpoint_path) > written_s, "a checkpoint is written", READY_S
    )
    known += await known_at(truth, worker, prompts, 4)  # only in the ring
    recovery_s = await restarted_sidecar(truth, worker, asker, prompts, known)
    (instance,) = [
        one
        for one in await truth.fleet.instances()
        if one["instance_id"] == await truth.instance_id(worker)
    ]
    assert instance["completeness_ratio"] == 1
    during = list(asker.asked)
    await traffic(asker, prompts, known, 3)
    await report.judge(
        "sidecar killed, checkpoint",
        asker.asked[len(during) :],
        during=during,
        recovery_s=recovery_s,
        bound_s=LEASE_S + 5.0,
    )


def _newest_s(folder: Path | None) -> float:
    assert folder is not None
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=0.0)


async def test_engine_killed(truth: Truth, asker: Asker, report: Report) -> None:
    """Only requests in flight on a killed engine fail; restarted it is a new, empty instance."""
    fleet, worker, prompts = truth.fleet, truth.fleet.workers["a"], Prompts(33)
    known = await known_at(truth, worker, prompts, 4)
    before = await truth.instance_id(worker)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(asker.complete(prompts.blocks(2), **LONG_STREAM)) for _ in range(10)
        ]
        await until(partial(_streams, fleet, before, 3), "answers have begun on the engine")
        at_risk = (await _counters(fleet, before))["reserved_requests"]
        worker.kill_engine()
        killed_s = time.time()
    in_flight = [task.result() for task in running]
    lost = [one for one in in_flight if one.error is not None]
    assert 3 <= len(lost) <= at_risk, [one.error for one in lost]

    await worker.start_engine()
    calm: list[Asked] = []
    while await fleet.status(f"{worker.url}/health") != 200:
        assert worker.engine is not None
        assert worker.engine.exit_code is None, worker.engine.tail()
        calm.append(await asker.complete([*known[len(calm) % 4], *prompts.ids(9)]))
        await asyncio.sleep(PACE_S)
    since_s = time.time()
    assert [one.error for one in calm if one.error is not None] == []
    assert before not in {one.instance_id for one in calm if one.sent_s > killed_s + LEASE_S}

    recovery_s = await truth.right_again(worker, known, since_s, DEADLINE_S)
    assert await truth.instance_id(worker) not in {None, before}
    asked = len(asker.asked)
    await traffic(asker, prompts, [prompts.blocks(2) for _ in range(6)], 4)
    assert len({one.instance_id for one in asker.asked[asked:]}) == 2
    await report.judge(
        "engine killed",
        [*calm, *asker.asked[asked:]],
        during=in_flight,
        recovery_s=recovery_s,
        bound_s=5.0,
    )


async def _counters(fleet: RealFleet, instance_id: str | None) -> dict[str, Any]:
    (counters,) = [one for one in await fleet.instances() if one["instance_id"] == instance_id]
    return counters


async def _streams(fleet: RealFleet, instance_id: str | None, requests: int) -> bool:
    """Whether so many streams run on an instance, the first token of each delivered."""
    counters = await _counters(fleet, instance_id)
    is_begun = counters["reserved_prefill_tokens"] == 0
    return is_begun and counters["reserved_requests"] >= requests
