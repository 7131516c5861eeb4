"""Messages of any shape on the event sockets, over real ZMQ: skipped and counted, one by one."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import numpy as np
import pytest
import zmq
import zmq.asyncio

from indexer.engine.history import Malformed, Received, Replayed
from indexer.engine.subscriber import REPLAY_ATTEMPTS, Subscriber

MESSAGES = 2000
DEADLINE_S = 30.0


class Sockets:
    """A publisher's sockets, and noise from a seed."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.live = context.socket(zmq.XPUB)
        self.live.setsockopt(zmq.SNDHWM, 0)
        self.ring = context.socket(zmq.ROUTER)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self.live, self.ring)]
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.seed = secrets.randbelow(2**32)
        self._rng = np.random.default_rng(self.seed)

    def noise(self, frame_counts: tuple[int, ...]) -> list[bytes]:
        """Frames that are no message of the protocol, which has one of these numbers of frames."""
        while True:
            count = int(self._rng.integers(1, 8))
            sizes = self._rng.choice((0, 1, 7, 8, 9, 300), size=count)
            frames = [self._rng.bytes(int(size)) for size in sizes]
            if count not in frame_counts or len(frames[-2]) != 8:
                return frames


@pytest.fixture
async def sockets() -> AsyncIterator[Sockets]:
    """The two sockets of a publisher."""
    context = zmq.asyncio.Context()
    try:
        yield Sockets(context)
    finally:
        context.destroy(linger=0)


async def test_no_live_message_stops_the_subscriber(sockets: Sockets) -> None:
    """Every batch among them is delivered, everything else is reported, in order."""

    async def publish() -> list[object]:
        await sockets.live.recv()  # the subscription
        expected: list[object] = []
        batches = 0
        for n in range(MESSAGES):
            if n % 3 == 0 or n == MESSAGES - 1:
                await sockets.live.send_multipart([b"", batches.to_bytes(8, "big"), b"%d" % n])
                expected.append(Received(batches, b"%d" % n))
                batches += 1
            else:
                frames = sockets.noise((3,))
                await sockets.live.send_multipart(frames)
                expected.append(Malformed(len(frames)))
        return expected

    async with (
        asyncio.timeout(DEADLINE_S),
        Subscriber(
            endpoint=sockets.endpoint, bind=False, replay_endpoint=None, topic=None
        ) as subscriber,
        asyncio.TaskGroup() as tasks,
    ):
        publishing = tasks.create_task(publish())
        items: list[object] = []
        async with contextlib.aclosing(subscriber.receive()) as receiving:
            async for item in receiving:
                items.append(item)
                if len(items) == MESSAGES:
                    break
        assert await publishing == items, f"seed {sockets.seed}"


async def test_no_replayed_message_stops_the_subscriber(sockets: Sockets) -> None:
    """A replay that breaks off in noise is tried again, from where it came to."""
    batches = [Received(n, b"%d" % n) for n in range(REPLAY_ATTEMPTS)]

    async def answer() -> None:
        for attempt in range(REPLAY_ATTEMPTS):
            client, _, start = await sockets.ring.recv_multipart()
            for batch in batches[int.from_bytes(start, "big") : attempt + 1]:
                frames = [b"", batch.sequence.to_bytes(8, "big"), batch.payload]
                await sockets.ring.send_multipart([client, *frames])
            last = [b"", b"\xff" * 8, b""] if attempt == REPLAY_ATTEMPTS - 1 else None
            await sockets.ring.send_multipart([client, *(last or sockets.noise((3, 4)))])

    async with (
        asyncio.timeout(DEADLINE_S),
        Subscriber(
            endpoint=sockets.endpoint,
            bind=False,
            replay_endpoint=sockets.replay_endpoint,
            topic=None,
        ) as subscriber,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(answer())
        items: list[object] = []
        async with contextlib.aclosing(subscriber.receive()) as receiving:
            async for item in receiving:
                items.append(item)
                if isinstance(item, Replayed) and not item.failed:
                    break
    failed = [item.failed for item in items if isinstance(item, Replayed)]
    assert failed == [True] * (REPLAY_ATTEMPTS - 1) + [False], f"seed {sockets.seed}"
    assert batches == [item for item in items if isinstance(item, Received)]
