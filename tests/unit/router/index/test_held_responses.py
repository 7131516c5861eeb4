"""What one router remembers of who holds which answer, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from waiting import until, until_equal

from indexer.contract import keys
from indexer.contract.functions import Command
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.link import Link, connected
from indexer.contract.responses import Holder, id_digest
from router.index import held_responses
from router.index.held_responses import HeldResponses
from router.index.redis_guard import RedisGuard
from router.telemetry import RESPONSES_LEARNED

FLEET = FleetId("f")
PLACES = {name: Holder.of(FLEET, InstanceId(name)) for name in "ab"}
PLAIN = b'{"id":"%s","created_at":1,"output":[{"id":"msg_1"}]}'
EVENT = b'event: response.created\ndata: {"response":{"id":"%s","output":[]},"type":"x"}\n\n'


class Clock:
    """Seconds that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


class PartlyAway:
    """Calls of it as a cluster's link makes them while a shard is away: the others execute theirs.

    Args:
        inner: the link to Redis.
        away: keys on that shard.
    """

    def __init__(self, inner: Link, away: set[str]) -> None:
        self._inner = inner
        self.away = away

    def __getattr__(self, name: str) -> Any:
        """All else is the link's."""
        return getattr(self._inner, name)

    async def execute(self, commands: Iterable[Command]) -> list[Any]:
        """Those of the living shards; then the failure, if one was not among them."""
        asked = list(commands)
        answers = await self._inner.execute([one for one in asked if one[3] not in self.away])
        if len(answers) < len(asked):
            raise RedisConnectionError("shard away")
        return answers


@pytest_asyncio.fixture
async def link(redis_client: redis.asyncio.Redis, redis_socket: Path) -> AsyncIterator[Link]:
    """To the embedded server, which nobody tells anything here."""
    del redis_client  # emptied
    async with connected(f"unix://{redis_socket}") as made:
        yield made


def dropped() -> float:
    """Ids that Redis will not be told, so far."""
    return float(RESPONSES_LEARNED.labels(result="dropped")._value.get())


def one_router(link: Link, clock: Clock, kept_s: float = 60.0) -> HeldResponses:
    """Whose memory is looked at."""
    return HeldResponses(link, guard=RedisGuard(deadline_s=2.0), kept_s=kept_s, clock=clock)


@pytest.mark.parametrize(
    "beginning",
    [
        PLAIN % b"resp_1",
        PLAIN.replace(b":", b" : ") % b"resp_1",
        EVENT % b"resp_1",
        EVENT.replace(b'"id":', b'"id": ')[:80] % b"resp_1",
    ],
)
async def test_an_id_is_read_from_the_beginning(link: Link, beginning: bytes) -> None:
    """Of a plain answer or of a stream's first event, however it is spaced, whole or not."""
    known = one_router(link, Clock())
    known.learn(beginning, FLEET, InstanceId("a#1"))
    assert await known.find("resp_1") == PLACES["a"]
    assert await known.find("msg_1") is None
    assert known.waiting() == 1


@pytest.mark.parametrize("beginning", [b"", b'{"x":1}', b" " * 5000 + PLAIN % b"resp_1"])
async def test_without_an_id_at_the_beginning_nothing_is_remembered(
    link: Link, beginning: bytes
) -> None:
    """An answer is not searched through."""
    known = one_router(link, Clock())
    known.learn(beginning, FLEET, InstanceId("a#1"))
    assert (known.waiting(), await known.find("resp_1")) == (0, None)


async def test_what_is_remembered_here_ends_in_time(link: Link) -> None:
    """As in Redis, which alone is asked then."""
    clock = Clock()
    known = one_router(link, clock, kept_s=60)
    known.learn(PLAIN % b"resp_1", FLEET, InstanceId("a#1"))
    clock.now_s = 59.0
    assert await known.find("resp_1") == PLACES["a"]
    clock.now_s = 60.0
    assert await known.find("resp_1") is None


async def test_memory_and_queue_are_bounded(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used give way; of what waits for Redis, the oldest."""
    monkeypatch.setattr(held_responses, "KNOWN_MAX", 3)
    monkeypatch.setattr(held_responses, "QUEUE_MAX", 2)
    known = one_router(link, Clock())
    for number in range(3):
        known.learn(PLAIN % b"resp_%d" % number, FLEET, InstanceId("a#1"))
    assert await known.find("resp_0") == PLACES["a"]
    known.learn(PLAIN % b"resp_3", FLEET, InstanceId("b#1"))
    found = [await known.find(f"resp_{number}") for number in range(4)]
    assert found == [PLACES["a"], None, PLACES["a"], PLACES["b"]]
    assert known.waiting() == 2


async def test_a_shard_that_is_away_holds_up_no_other(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id of it is in every batch; those of the others are told, and its own when it is back."""
    monkeypatch.setattr(held_responses, "SEND_MAX", 4)
    monkeypatch.setattr(held_responses, "RETRY_S", 0.01)
    ids = [f"resp_{number}" for number in range(40)]
    shards = PartlyAway(link, away={keys.responses(id_digest(one)) for one in ids[::4]})
    known, other = one_router(shards, Clock()), one_router(link, Clock())
    for one in ids:
        known.learn(PLAIN % one.encode(), FLEET, InstanceId("a#1"))
    task = asyncio.ensure_future(known.run())

    async def all_others_know() -> bool:
        living = [one for one in ids if keys.responses(id_digest(one)) not in shards.away]
        return all([await other.find(one) == PLACES["a"] for one in living])

    await until(all_others_know, "all that can be told is told")
    shards.away.clear()

    async def all_know() -> bool:
        return all([await other.find(one) == PLACES["a"] for one in ids])

    await until(all_know, "the others too")
    task.cancel()
    await asyncio.wait([task])


async def test_what_is_not_taken_gives_way_to_what_is_new(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue stays within its bound, whatever comes while a batch is under way."""
    monkeypatch.setattr(held_responses, "QUEUE_MAX", 3)
    shards = PartlyAway(link, away={keys.responses(id_digest("resp_0"))})
    known, before = one_router(shards, Clock()), dropped()
    for number in range(3):
        known.learn(PLAIN % b"resp_%d" % number, FLEET, InstanceId("a#1"))
    task = asyncio.ensure_future(known.run())
    await asyncio.sleep(0)  # its batch is on the way
    for number in range(3, 6):
        known.learn(PLAIN % b"resp_%d" % number, FLEET, InstanceId("a#1"))
    await until_equal(before + 3, dropped)
    task.cancel()
    await asyncio.wait([task])
