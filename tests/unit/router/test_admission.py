"""The door counts in and out, whatever happens inside."""

import asyncio
import contextlib

import pytest

from router.admission import Admission
from router.errors import DropReason, Overloaded


def door(requests_max: int = 2, bytes_max: int = 100) -> Admission:
    """A small door."""
    return Admission(requests_max=requests_max, bytes_max=bytes_max)


async def test_requests_beyond_the_bound_are_refused() -> None:
    """The place of a request that has ended is free again, also after a failure."""
    admission = door(requests_max=1)
    full = pytest.raises(Overloaded, match="in_flight_requests_max")
    with contextlib.suppress(KeyError), admission.enter():
        with full, admission.enter():
            pass
        raise KeyError
    with admission.enter():
        assert admission.requests == 1
    assert admission.requests == 0


async def test_bytes_beyond_the_bound_are_refused() -> None:
    """All requests share the bytes, and give theirs back."""
    admission = door(bytes_max=100)
    with admission.enter() as first, admission.enter() as second:
        first.hold(60)
        with pytest.raises(Overloaded, match="in_flight_bytes_max"):
            second.hold(41)
        second.hold(40)
    with admission.enter() as third:
        third.hold(100)


async def test_a_drain_waits_for_the_last_request() -> None:
    """New ones are refused meanwhile, with a reason of their own."""
    admission = door()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def request() -> None:
        with admission.enter():
            entered.set()
            await leave.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(request())
        await entered.wait()
        drain = tasks.create_task(admission.drain(deadline_s=5.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught, admission.enter():
            pass
        assert (caught.value.reason, drain.done()) == (DropReason.DRAINING, False)
        leave.set()
        assert await drain == 0


async def test_a_drain_has_a_deadline() -> None:
    """What does not end is counted."""
    admission = door()
    with admission.enter():
        assert await admission.drain(deadline_s=0.01) == 1


async def test_an_announced_drain_still_admits() -> None:
    """Balancers get time to notice."""
    admission = door()
    admission.announce_drain()
    with admission.enter():
        assert (admission.draining, admission.requests) == (True, 1)
