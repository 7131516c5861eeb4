"""Waits end as `asyncio.timeout` ends them, with one timer for all of one length."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from indexer.contract.waits import Waits

LENGTH_S = 0.02
FOREVER_S = 60.0

Guard = Callable[[], AbstractAsyncContextManager[Any]]


def ours() -> Guard:
    """A guard made of waits of one length."""
    waits = Waits(LENGTH_S)

    @asynccontextmanager
    async def guard() -> Any:
        with waits.one() as wait:
            yield wait

    return guard


def asyncios() -> Guard:
    """The guard that ours has to equal."""
    return lambda: asyncio.timeout(LENGTH_S)


async def _in_time(guard: Guard) -> str:
    async with guard():
        await asyncio.sleep(0)
    return "done"


async def _too_late(guard: Guard) -> str:
    async with guard():
        await asyncio.sleep(FOREVER_S)
    return "not reached"


async def _cancelled_by_another(guard: Guard) -> str:
    task = asyncio.current_task()
    assert task is not None
    async with guard():
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(FOREVER_S)
    return "not reached"


async def _own_error(guard: Guard) -> str:
    async with guard():
        raise ValueError


async def _late_and_error(guard: Guard) -> str:
    """What is raised instead of the cancellation wins, and the task is no longer cancelled."""
    try:
        async with guard():
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                raise ValueError from None
    except ValueError:
        task = asyncio.current_task()
        assert task is not None
        return f"{task.cancelling()} cancellations left"
    return "not reached"


async def _late_and_cancelled(guard: Guard) -> str:
    """Where somebody else has cancelled the task in the same turn, it stays cancelled."""
    task = asyncio.current_task()
    assert task is not None
    async with guard():
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
    return "not reached"


async def _inner_of_two(guard: Guard) -> str:
    async with asyncio.timeout(FOREVER_S):
        try:
            return await _too_late(guard)
        except TimeoutError:
            return "the inner one"


async def _outcome(case: Callable[[Guard], Awaitable[str]], guard: Guard) -> str:
    task = asyncio.ensure_future(case(guard))
    await asyncio.wait([task], timeout=5.0)
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return task.result() if error is None else type(error).__name__


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (_in_time, "done"),
        (_too_late, "TimeoutError"),
        (_cancelled_by_another, "cancelled"),
        (_own_error, "ValueError"),
        (_late_and_error, "0 cancellations left"),
        (_late_and_cancelled, "cancelled"),
        (_inner_of_two, "the inner one"),
    ],
)
def test_a_wait_ends_as_asyncios_does(
    case: Callable[[Guard], Awaitable[str]], told: str, runner: Callable[[Any], str]
) -> None:
    """Whatever happens inside, the same comes out."""
    assert [runner(_outcome(case, one)) for one in (asyncios(), ours())] == [told, told]


async def test_each_wait_of_many_ends_at_its_own_time() -> None:
    """The timer goes on from the oldest wait to the next, whoever has left in between."""
    waits, loop = Waits(LENGTH_S), asyncio.get_running_loop()
    late_s: list[float] = []

    async def wait(number: int) -> None:
        await asyncio.sleep(number * LENGTH_S / 10)
        try:
            with waits.one() as wait:
                await asyncio.sleep(0 if number % 3 == 0 else FOREVER_S)
        except TimeoutError:
            assert wait.over
            late_s.append(loop.time() - wait.deadline_s)

    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        for number in range(30):
            tasks.create_task(wait(number))
    assert len(late_s) == 20
    assert min(late_s) >= 0.0


async def test_time_alone_or_somebody_else() -> None:
    """`over` tells whether the wait's own time has cancelled the task, for whoever must know."""
    waits = Waits(LENGTH_S)
    seen: list[tuple[bool, bool]] = []

    async def wait(cancel: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        with waits.one() as one:
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                if cancel:
                    task.cancel()
                seen.append((one.expired, one.over))
                raise

    outcomes = await asyncio.gather(wait(False), wait(True), return_exceptions=True)
    assert [type(one) for one in outcomes] == [TimeoutError, asyncio.CancelledError]
    assert seen == [(True, True), (True, False)]


def test_a_second_event_loop_has_timers_of_its_own() -> None:
    """A timer that its loop took with it does not keep later waits from ending."""
    waits = Waits(LENGTH_S)

    async def leave_a_timer() -> None:
        with waits.one():
            await asyncio.sleep(0)

    async def too_late() -> None:
        async with asyncio.timeout(5.0):
            with waits.one():
                await asyncio.sleep(FOREVER_S)

    asyncio.run(leave_a_timer())
    with pytest.raises(TimeoutError):
        asyncio.run(too_late())


async def test_only_a_task_can_wait() -> None:
    """In a callback there is nothing to cancel; said at once, not when the time is over."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def callback() -> None:
        with pytest.raises(RuntimeError, match="only a task") as raised:
            Waits(LENGTH_S).one().__enter__()
        told.set_result(str(raised.value))

    asyncio.get_running_loop().call_soon(callback)
    async with asyncio.timeout(5.0):
        await told
