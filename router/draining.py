"""The end of a router process: nothing new comes in, what runs is answered or told of the end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from router.door.admission import Admission
from router.http.listeners import Listeners

log = structlog.get_logger()


async def drain(
    admission: Admission,
    listeners: Listeners,
    hurry: asyncio.Event,
    *,
    notice_s: float,
    deadline_s: float,
) -> None:
    """Not ready first, then no new connections and requests, then the end of what runs.

    A stream that the deadline cuts off is told so in its last event.

    Args:
        admission: who is inside.
        listeners: connections of clients.
        hurry: cuts both waits short.
        notice_s: for balancers to notice.
        deadline_s: for answers to finish.
    """
    log.info("drain_started", in_flight=admission.requests)
    admission.announce_drain()
    await _either(asyncio.sleep(notice_s), hurry.wait())
    await listeners.stop_accepting()
    await _either(_answered(admission, listeners, deadline_s), hurry.wait())
    log.info("drain_ended", cut_off=admission.requests)
    admission.cut_off()
    await listeners.close()


async def _answered(admission: Admission, listeners: Listeners, deadline_s: float) -> None:
    """Close the door, and wait until all who are inside have their whole answers."""
    try:
        async with asyncio.timeout(deadline_s):
            await admission.drain(deadline_s)
            await listeners.sent()
    except TimeoutError:
        return


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and end the others."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
