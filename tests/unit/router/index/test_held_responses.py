"""What one router remembers of who holds which answer, and for how long."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio

from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.link import Link, connected
from indexer.contract.responses import Holder
from router.index import held_responses
from router.index.held_responses import HeldResponses
from router.index.redis_guard import RedisGuard

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


@pytest_asyncio.fixture
async def link(redis_client: redis.asyncio.Redis, redis_socket: Path) -> AsyncIterator[Link]:
    """To the embedded server, which nobody tells anything here."""
    del redis_client  # emptied
    async with connected(f"unix://{redis_socket}") as made:
        yield made


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
