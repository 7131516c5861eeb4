"""Replays against a real local server: what is recorded, what is sent when."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from completion_server import DEADLINE_S, Server, make_rows, run_one, serving, whole_stream

from loadgen.arrivals import constant
from loadgen.client import Target
from loadgen.records import RequestRecord
from loadgen.replay import Progress, replay

pytestmark = pytest.mark.integration


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a free port."""
    async with serving() as server:
        yield server


async def test_good_stream_is_recorded_whole(server: Server) -> None:
    """Times in order, usage, headers of the router, and no error."""
    record = await run_one(server)
    assert (
        record.error,
        record.status,
        record.prompt_tokens,
        record.output_tokens,
        record.cached_tokens,
    ) == (None, 200, 16, 3, 16)
    assert (
        record.instance,
        record.decision,
    ) == ("engine-a", {"policy": "lmetric", "hit_tokens": 16})
    assert len(record.token_times_s) == 3
    times_s = [record.scheduled_s, record.sent_s, *record.token_times_s, record.finished_s]
    assert times_s == sorted(times_s)
    assert record.first_token_s == record.token_times_s[0]


async def test_request_id_is_ours_and_headers_go_along(server: Server) -> None:
    """The id in the record is the one the server got."""
    record = await run_one(server, headers={"x-timestable-policy": "round_robin"}, api_key="k")
    head = server.heads[0].lower()
    assert f"x-request-id: {record.request_id}\r\n" in head
    assert "x-timestable-policy: round_robin\r\n" in head
    assert "authorization: bearer k\r\n" in head


async def test_connections_are_reused(server: Server) -> None:
    """Requests one after the other share a connection."""
    rows = make_rows(3)
    await replay(rows, (0.0, 0.0, 0.0), Target(url=server.url, model="m"), in_flight_max=1)
    assert (len(server.bodies), server.connections_count) == (3, 1)


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """Largest number of requests in flight, by their own times."""
    began = [(record.sent_s, 1) for record in records]
    ended = [(record.finished_s, -1) for record in records]
    return max(accumulate(step for _, step in sorted(began + ended)))


async def test_in_flight_bound_holds(server: Server) -> None:
    """No more requests at once than allowed; the wait shows as schedule lag, nothing is lost."""
    pair = asyncio.Barrier(2)

    async def answer_in_pairs(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await pair.wait()
        await whole_stream(body, writer)

    server.answer = answer_in_pairs
    target = Target(url=server.url, model="m")
    async with asyncio.timeout(DEADLINE_S):
        result = await replay(make_rows(8), constant(8, request_rate=1e6), target, in_flight_max=2)
    assert {None} == {record.error for record in result.records}
    assert most_at_once(result.records) == 2
    first, *_, last = result.records
    assert last.scheduled_s < (first.finished_s or 0.0) <= (last.sent_s or 0.0)


async def test_open_loop_sends_on_time_whatever_the_server_does(server: Server) -> None:
    """A server that answers nothing delays no send."""
    server.answer = server.silence
    target = Target(url=server.url, model="m", request_timeout_s=0.5)
    result = await replay(make_rows(5), constant(5, request_rate=50.0), target)
    assert {"timeout: no end of the answer within 0.5 s"} == {r.error for r in result.records}
    assert all(r.sent_s is not None and r.sent_s - r.scheduled_s < 0.4 for r in result.records)


async def test_follow_up_waits_for_the_answer_before_it(server: Server) -> None:
    """Closed loop within a session: due when answered, so waiting is no schedule lag."""
    rows = make_rows(2, session_id="s")
    target = Target(url=server.url, model="m")
    result = await replay(rows, (0.0, 0.0), target, wait_for_previous_turn=True)
    first, second = result.records
    assert first.finished_s is not None
    assert second.scheduled_s >= first.finished_s


async def test_in_closed_loop_a_follow_up_is_sent_a_think_time_after_the_answer(
    server: Server,
) -> None:
    """Neither before it nor at the trace's own time, which is hours away; first turns are."""
    first, follow_up = make_rows(2, session_id="s")
    (other,) = make_rows(1, session_id="t")
    rows = (first, replace(other, arrival_s=0.1), replace(follow_up, arrival_s=9e3, think_s=0.3))
    target = Target(url=server.url, model="m")
    result = await replay(rows, (0.0, 0.1, 9e3), target, pace="closed_loop")
    answered, beside, thought = result.records
    assert answered.finished_s is not None
    assert thought.sent_s is not None
    assert thought.scheduled_s >= answered.finished_s + 0.3
    assert thought.sent_s >= thought.scheduled_s
    assert (beside.scheduled_s, beside.error, thought.error) == (0.1, None, None)


async def test_progress_ends_with_everything_finished(server: Server) -> None:
    """The last call says so."""
    seen: list[Progress] = []
    target = Target(url=server.url, model="m")
    await replay(make_rows(4), (0.0,) * 4, target, on_progress=seen.append)
    assert (
        seen[-1].total_count,
        seen[-1].sent_count,
        seen[-1].finished_count,
        seen[-1].errors_count,
        seen[-1].in_flight_count,
    ) == (4, 4, 4, 0, 0)


async def test_cancelling_a_replay_closes_its_connections(server: Server) -> None:
    """No request outlives the one who asked for it."""
    server.answer = server.silence
    target = Target(url=server.url, model="m")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(replay(make_rows(2), (0.0, 0.0), target))
        await server.wait_for_requests(2)
        task.cancel()
    assert task.cancelled()
