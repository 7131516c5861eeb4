"""The door counts in and out, whatever happens inside."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until, until_equal

from router.door.admission import Admission
from router.door.visitor import Caller, Visitor
from router.door.waiting_line import WaitingLine
from router.errors import DropReason, Overloaded, QueueTimeout


def door(
    requests_max: int = 2,
    bytes_max: int = 100,
    queue_requests_max: int = 0,
    queue_deadline_s: float = 1.0,
) -> Admission:
    """A small door."""
    return Admission(
        requests_max=requests_max,
        bytes_max=bytes_max,
        queue_requests_max=queue_requests_max,
        queue_deadline_s=queue_deadline_s,
    )


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


class Line:
    """A door with one place and room for three that wait; guests stay until told to go."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.admission = door(requests_max=1, queue_requests_max=3, queue_deadline_s=5.0)
        self.served: list[str] = []
        self.refused: dict[str, DropReason] = {}
        self.go = asyncio.Event()
        self._tasks = tasks

    async def arrive(
        self, name: str, priority: int = 0, *, in_body: bool = False, caller: str | None = None
    ) -> asyncio.Task[None]:
        """Let one in and see it placed, waiting or refused."""
        visitor = Visitor(
            caller=None if caller is None else Caller(name=caller),
            asked_priority=None if in_body else priority,
        )
        body = b'{"priority": %d}' % priority if in_body else b""
        task = self._tasks.create_task(self._guest(name, visitor, body))
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def _guest(self, name: str, visitor: Visitor, body: bytes) -> None:
        try:
            with self.admission.enter(visitor) as ticket:
                await ticket.wait_for_place(body)
                self.served.append(name)
                await self.go.wait()
        except Overloaded as error:
            self.refused[name] = error.reason

    async def emptied(self) -> None:
        """Let all go, one after the other, and see the books at zero."""
        self.go.set()
        await until(lambda: not self.admission.requests and not self.admission.queued, "empty")


async def test_the_most_important_is_served_first() -> None:
    """Lower is more important; among equals who came first."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        await line.arrive("in flight")
        for name, priority in (("late", 5), ("first", 0), ("second", 0)):
            await line.arrive(name, priority)
        await line.emptied()
        assert line.served == ["in flight", "first", "second", "late"]


async def test_nobody_overtakes_those_who_wait() -> None:
    """A place that becomes free belongs to the line, not to whoever arrives at that moment."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        first = await line.arrive("in flight")
        await line.arrive("waiting")
        first.cancel()
        await asyncio.sleep(0)
        await line.arrive("newcomer")
        assert (line.served, line.admission.queued) == (["in flight", "waiting"], 1)
        await line.emptied()


async def test_a_full_queue_refuses_the_next() -> None:
    """With the reason that a client knows from a full house without a queue."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        for name in ("in flight", "a", "b", "c", "too many"):
            await line.arrive(name)
        assert line.refused == {"too many": DropReason.OVERLOADED}
        await line.emptied()


async def test_the_least_important_gives_way_in_a_full_queue() -> None:
    """For one whose importance is known beforehand; of equals nobody gives way.

    What stands in a body is not known then, and counts as what nobody asks for.
    """
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        for name, priority in (("in flight", 0), ("a", 1), ("b", 2), ("c", 2)):
            await line.arrive(name, priority)
        await line.arrive("equal", 2)
        await line.arrive("better", -1)
        await line.arrive("in body", -1, in_body=True)
        await line.emptied()
        assert set(line.refused) == {"equal", "c", "in body"}
        assert set(line.refused.values()) == {DropReason.OVERLOADED}
        assert line.served == ["in flight", "better", "a", "b"]


async def test_callers_take_turns() -> None:
    """Whoever has much waiting does not hold up who has little, nor keep it out of a full queue."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        for name in ("in flight", "much 1", "much 2", "much 3"):
            await line.arrive(name, caller="much")
        await line.arrive("little 1", caller="little")
        await line.arrive("little 2", caller="little")  # they have as much waiting now, but for one
        await line.arrive("third", caller="third")
        await line.emptied()
        assert line.refused == dict.fromkeys(
            ("much 3", "little 2", "much 2"), DropReason.OVERLOADED
        )
        assert line.served == ["in flight", "much 1", "little 1", "third"]


async def test_who_leaves_the_line_frees_its_stead_at_once() -> None:
    """Also when its turn comes in the very moment: the place goes to the next."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        first = await line.arrive("in flight")
        a = await line.arrive("a")
        await line.arrive("b")
        leaver = await line.arrive("leaver")
        leaver.cancel()
        await until_equal(2, lambda: len(line.admission._line))
        await line.arrive("c")
        assert not line.refused
        first.cancel()
        await asyncio.sleep(0)  # "a" has been handed the place, and does not know yet
        a.cancel()
        await until_equal(["in flight", "b"], lambda: line.served)
        await line.emptied()
        assert line.served == ["in flight", "b", "c"]


async def test_waiting_has_a_deadline() -> None:
    """Afterwards there is nothing left of the request."""
    admission = door(requests_max=1, queue_requests_max=1, queue_deadline_s=0.01)
    with admission.enter():
        with pytest.raises(QueueTimeout, match="queue_deadline_s"), admission.enter() as ticket:
            await ticket.wait_for_place()
        assert (admission.requests, admission.queued) == (1, 0)


async def test_a_drain_refuses_those_who_wait() -> None:
    """Nothing has begun for them; what is in flight ends as it would."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        first = await line.arrive("in flight")
        await line.arrive("waiting")
        drain = asyncio.get_running_loop().create_task(line.admission.drain(5.0))
        await until_equal({"waiting": DropReason.DRAINING}, lambda: line.refused)
        assert not first.done()
        await line.emptied()
        assert await drain == 0


async def test_bytes_of_those_who_wait_count() -> None:
    """They are read before they wait."""
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        await line.arrive("in flight")
        with line.admission.enter() as ticket:
            ticket.hold(100)
            with pytest.raises(Overloaded, match="in_flight_bytes_max"):
                ticket.hold(1)
        await line.emptied()


class NaiveLine:
    """What a line should be: one list, and who has had a turn since when."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str, int]] = []  # priority, caller, arrival
        self.turns: dict[tuple[int, str], int] = {}  # when a caller was put at the end
        self.steps = 0

    def join(self, place: tuple[int, str, int]) -> None:
        if not any(one[:2] == place[:2] for one in self.waiting):
            self._to_end(place[:2])
        self.waiting.append(place)

    def first(self) -> tuple[int, str, int]:
        return min(self.waiting, key=lambda one: (one[0], self.turns[one[:2]], one[2]))

    def take_first(self) -> tuple[int, str, int]:
        place = self.first()
        self.waiting.remove(place)
        self._to_end(place[:2])
        return place

    def last(self) -> tuple[int, str, int]:
        return max(
            self.waiting,
            key=lambda one: (one[0], self.count(*one[:2]), self.turns[one[:2]], one[2]),
        )

    def count(self, priority: int, caller: str) -> int:
        return sum(one[:2] == (priority, caller) for one in self.waiting)

    def gives_way_to(self, priority: int, caller: str) -> bool:
        if not self.waiting:
            return False
        worst, greediest, _ = self.last()
        more = self.count(priority, caller) + 1 < self.count(worst, greediest)
        return priority < worst or (priority == worst and more)

    def _to_end(self, who: tuple[int, str]) -> None:
        self.steps += 1
        self.turns[who] = self.steps


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "leave", "first", "last"]),
        st.integers(-1, 1),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_line_is_by_priority_and_turns(steps: list[tuple[str, int, str]]) -> None:
    """Whoever joins and leaves in whatever order, as a list that is searched would have it."""
    line: WaitingLine[tuple[int, str, int]] = WaitingLine()
    model = NaiveLine()
    places = {}
    for arrival, (step, number, caller) in enumerate(steps):
        assert line.gives_way_to(number, caller) == model.gives_way_to(number, caller)
        if step == "join":
            guest = (number, caller, arrival)
            model.join(guest)
            places[arrival] = line.join(number, guest, caller)
        elif model.waiting and step == "leave":
            one = model.waiting.pop(number % len(model.waiting))
            assert line.leave(places[one[2]])
            assert not line.leave(places[one[2]])
        elif model.waiting and step == "first":
            assert line.take_first() == model.take_first()
        elif model.waiting and step == "last":
            one = model.last()
            model.waiting.remove(one)
            assert line.take_last() == one
        assert len(line) == len(model.waiting)
