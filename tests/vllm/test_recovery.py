"""Faults under real engines: how long until predictions are right again."""

import asyncio
import signal
import time
from functools import partial

import pytest
from waiting import until, until_equal

from tests.vllm.asking import Asker, traffic
from tests.vllm.cases import Report
from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts
from tests.vllm.settings import BLOCK, LEASE_S, RING_BATCHES
from tests.vllm.truth import Truth

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]

DEADLINE_S = 60.0
"""For a recovery; the bounds are what is asserted."""


@pytest.fixture
def truth(fleet: RealFleet) -> Truth:
    """Index against engine."""
    return Truth(fleet=fleet)


async def is_known(truth: Truth, name: str, prompt: list[int], tokens: int) -> bool:
    """Whether a worker is credited with so many hit tokens of a prompt."""
    return await truth.predicted(truth.fleet.workers[name], prompt) == tokens


async def filled(truth: Truth, name: str, prompts: list[list[int]]) -> None:
    """Let a worker compute prompts of 3 blocks; return when the index knows."""
    for prompt in prompts:
        await truth.fill(truth.fleet.workers[name], prompt)
    for prompt in prompts:
        await until(partial(is_known, truth, name, prompt, 3 * BLOCK), f"{name}'s blocks are known")


async def test_reset_of_an_idle_engine(truth: Truth, asker: Asker, report: Report) -> None:
    """A reset is not announced while the engine is idle; from its next batch on all is right."""
    worker, prompts = truth.fleet.workers["a"], Prompts(21)
    known = [prompts.blocks(3) for _ in range(6)]
    await filled(truth, "a", known)
    await truth.fleet.post(f"{worker.url}/reset_prefix_cache")
    assert await truth.predicted(worker, known[0]) == 3 * BLOCK  # the engine has said nothing
    assert await truth.fill(worker, prompts.blocks(1)) == 0  # the next batch
    since_s = time.time()
    recovery_s = await truth.right_again(worker, known, since_s, DEADLINE_S)
    await traffic(asker, prompts, known, 4)
    await report.judge("engine's cache reset", asker.asked, recovery_s=recovery_s, bound_s=1.0)


async def test_sleep(truth: Truth, asker: Asker, report: Report) -> None:
    """An engine that sleeps is not chosen; what it discarded is not credited after it wakes."""
    fleet, worker, prompts = truth.fleet, truth.fleet.workers["a"], Prompts(22)
    known = [prompts.blocks(3) for _ in range(6)]
    await filled(truth, "a", known)
    asleep = await truth.instance_id(worker)
    await fleet.post(f"{worker.url}/sleep?level=1")
    slept_s = time.time()
    try:
        await until_equal(None, partial(truth.instance_id, worker))
        assert time.time() - slept_s < 2.0
        await traffic(asker, prompts, known, 2)
        assert asleep not in {one.instance_id for one in asker.asked}
    finally:
        await fleet.post(f"{worker.url}/wake_up")
    recovery_s = await truth.right_again(worker, known, time.time(), DEADLINE_S)
    assert await truth.instance_id(worker) == asleep
    await traffic(asker, prompts, [prompts.blocks(2) for _ in range(6)], 2)
    await report.judge("engine slept", asker.asked, recovery_s=recovery_s, bound_s=2.0)


async def test_lost_messages_that_the_ring_holds(
    truth: Truth, asker: Asker, report: Report
) -> None:
    """Lost batches are replayed even if the engine says nothing more: within 3 s all is right."""
    fleet, worker, prompts = truth.fleet, truth.fleet.workers["b"], Prompts(23)
    assert worker.forwarder is not None
    known, lost = ([prompts.blocks(3) for _ in range(4)] for _ in range(2))
    await filled(truth, "b", known)
    gaps, before = await fleet.metric(worker, "gaps_total"), worker.forwarder.lost
    worker.forwarder.lose(len(lost))
    for prompt in lost:
        await truth.fill(worker, prompt)
    await until_equal(before + len(lost), lambda: worker.forwarder and worker.forwarder.lost)
    recovery_s = await truth.right_again(worker, [*known, *lost], time.time(), DEADLINE_S)
    assert await fleet.metric(worker, "gaps_total") == gaps
    await traffic(asker, prompts, [*known, *lost], 3)
    await report.judge("lost, ring covers", asker.asked, recovery_s=recovery_s, bound_s=3.0)


async def test_lost_messages_beyond_the_ring(truth: Truth, asker: Asker, report: Report) -> None:
    """What is not provably there is not credited; what the engine shows again is, within 10 s.

    While more batches are lost than the ring holds, some of the known prompts are evicted. Of those
    that stayed, some are shown by a longer prompt, the others by what an answer's usage tells.
    """
    fleet, worker, prompts = truth.fleet, truth.fleet.workers["b"], Prompts(24)
    shown, noticed, evicted = ([prompts.blocks(3) for _ in range(4)] for _ in range(3))
    await filled(truth, "b", [*shown, *noticed, *evicted])
    gaps = await fleet.metric(worker, "gaps_total")
    await lose_beyond_the_ring(truth, prompts, [*shown, *noticed])
    since_s = time.time()
    await until_equal(gaps + 1, partial(fleet.metric, worker, "gaps_total"))
    await until(partial(is_incomplete, truth, "b"), "b's completeness is lowered")
    await until(partial(is_known, truth, "b", shown[0], 0), "the doubt is published")
    for prompt in evicted:
        seen = await truth.seen(worker, prompt)
        assert seen is not None
        assert seen.predicted == 0
        assert seen.actual < 3 * BLOCK
    longer = [[*prompt[: 3 * BLOCK], *prompts.blocks(1)] for prompt in shown]
    for prompt in longer:  # a new block names its parent, which proves all above it
        assert await truth.fill(worker, prompt) == 3 * BLOCK
    await truth.right_again(worker, [*shown, *longer], since_s, DEADLINE_S)
    stems = [*shown, *noticed, *evicted]
    recovery_s = await first_exact_round(asker, prompts, stems) - since_s
    during = list(asker.asked)
    assert all(one.predicted_tokens <= one.actual_tokens for one in during)
    await traffic(asker, prompts, stems, 3)
    await report.judge(
        "lost, ring wrapped",
        asker.asked[len(during) :],
        during=during,
        recovery_s=recovery_s,
        bound_s=10.0,
    )


async def lose_beyond_the_ring(truth: Truth, prompts: Prompts, kept: list[list[int]]) -> None:
    """Lose more batches of `b` than its ring holds; only prompts that are kept stay in use.

    In the silence the ring is asked once, and not again before the next message: only from then on
    it is left behind, however fast the engine is.
    """
    worker = truth.fleet.workers["b"]
    assert worker.forwarder is not None
    before = worker.forwarder.lost
    asked = await truth.fleet.metric(worker, "replays_total")
    worker.forwarder.lose(1 << 30)
    await truth.fill(worker, prompts.blocks(1))
    await until(partial(has_asked, truth, asked), "the ring is asked")
    for number in range(RING_BATCHES + 26):
        await truth.fill(worker, prompts.blocks(1))
        if number % 8 == 0:
            for prompt in kept:
                assert await truth.fill(worker, prompt) == 3 * BLOCK
    worker.forwarder.lose(0)
    assert worker.forwarder.lost - before > RING_BATCHES
    await truth.fill(worker, prompts.blocks(1))


async def has_asked(truth: Truth, before: float) -> bool:
    """Whether the sidecar of `b` has asked the ring since."""
    return await truth.fleet.metric(truth.fleet.workers["b"], "replays_total") > before


async def is_incomplete(truth: Truth, name: str) -> bool:
    """Whether a router shows that a worker's index is not complete."""
    instance_id = await truth.instance_id(truth.fleet.workers[name])
    instances = await truth.fleet.instances()
    ratios: list[float] = [
        one["completeness_ratio"] for one in instances if one["instance_id"] == instance_id
    ]
    return ratios[0] < 1


async def first_exact_round(asker: Asker, prompts: Prompts, stems: list[list[int]]) -> float:
    """Ask for the stems until a whole round is predicted exactly; when that round began."""
    while True:
        started_s, asked = time.time(), len(asker.asked)
        await traffic(asker, prompts, stems, 1)
        if all(one.predicted_tokens == one.actual_tokens for one in asker.asked[asked:]):
            return started_s


async def test_sidecar_paused_beyond_its_lease(truth: Truth, asker: Asker, report: Report) -> None:
    """A sidecar that hangs loses its lease; back, it credits nothing that went in the meantime."""
    worker, prompts = truth.fleet.workers["a"], Prompts(25)
    known = [prompts.blocks(3) for _ in range(6)]
    await filled(truth, "a", known)
    worker.signal_sidecar(signal.SIGSTOP)
    stopped_s = time.time()
    try:
        for _ in range(40):  # evicts all that was known
            await truth.fill(worker, prompts.blocks(3))
        while await truth.instance_id(worker) is not None:
            await traffic(asker, prompts, known[:1], 1)
        assert time.time() - stopped_s < LEASE_S + 2
        during = list(asker.asked)
        await traffic(asker, prompts, known, 1)
    finally:
        worker.signal_sidecar(signal.SIGCONT)
    since_s = time.time()
    while (first := await truth.seen(worker, known[5])) is None:
        assert time.time() - since_s < DEADLINE_S
        await asyncio.sleep(0.01)
    assert first.predicted <= first.actual, "credited before the ring was asked"
    recovery_s = await truth.right_again(worker, known, since_s, DEADLINE_S)
    await traffic(asker, prompts, known, 2)
    await report.judge(
        "sidecar paused",
        asker.asked[len(during) :],
        during=during,
        recovery_s=recovery_s,
        bound_s=5.0,
    )
