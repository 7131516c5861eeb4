"""One fault under load, from the first calm request to the last counter."""

import asyncio

import aiohttp

from deploy.chaos.books import Books
from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.config import hold_s, load_calm_s
from deploy.chaos.errors import NotRecoveredError
from deploy.chaos.faults.base import FaultCase
from deploy.chaos.load import Load
from deploy.chaos.records import tally
from deploy.chaos.summary import FaultResult


async def run(fleet: ChaosFleet, books: Books, case: FaultCase, *, seed: int) -> FaultResult:
    """Do a fault to a whole fleet and tell what it cost; the fleet is whole afterwards, or not.

    Raises:
        FleetError: a part ended that nobody meant to end.
    """
    reason = case.skip_reason()
    if reason is not None:
        return FaultResult(name=case.name, skipped=reason)
    fleet.excuses.clear()
    fleet.notes.clear()
    await books.begin()
    load = Load(fleet=fleet, seed=seed, rate=fleet.config.rate)
    if case.left_share is not None:
        load.left_before_first_byte_share, load.left_mid_stream_share = case.left_share
    trouble: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(load.run(), name="load")
        sampling = tasks.create_task(books.sample(), name="audit")
        try:
            recovery_s = await _fault(fleet, case, trouble)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            sampling.cancel()
    not_zero = await books.wait_zero(fleet.config.zero_deadline_s)
    if not_zero is not None:
        trouble.append(not_zero)
    counted = tally(load.records, fleet.excuses)
    return FaultResult(
        name=case.name,
        requests=counted.requests,
        failed=counted.failed,
        failed_explained=counted.failed_explained,
        recovery_s=recovery_s,
        counters_zero=not_zero is None,
        trouble=(*trouble, *books.differences),
        causes=counted.causes,
        unexplained=counted.unexplained,
        clients_left=counted.clients_left,
        audit_differences_max=books.differences_max,
        audit_samples=books.samples,
        ttft_p99_s=round(counted.ttft_p99_s, 3),
        notes=dict(fleet.notes),
    )


async def _fault(fleet: ChaosFleet, case: FaultCase, trouble: list[str]) -> float | None:
    """Calm, fault, recovery, calm; the seconds that recovery took."""
    config = fleet.config
    await asyncio.sleep(load_calm_s(config))
    began_s = fleet.now_s()
    try:
        try:
            await case.inject(fleet)
            await asyncio.sleep(hold_s(config) if case.hold_s is None else case.hold_s)
        finally:
            if not case.from_injection:
                began_s = fleet.now_s()
            await case.end(fleet)
        await fleet.wait_whole(config.recovery_deadline_s)
    except (NotRecoveredError, aiohttp.ClientError, TimeoutError) as error:
        trouble.append(str(error))
        return None
    recovery_s = round(fleet.now_s() - began_s, 2)
    await asyncio.sleep(load_calm_s(config))
    return recovery_s
