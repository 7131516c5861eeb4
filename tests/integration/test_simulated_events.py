"""The simulated engine's events over real ZMQ sockets, as a client of vLLM sees them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import pytest
import zmq
import zmq.asyncio

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.event_encoding import EventEncoding, encode_batch
from workers.simulated.metrics import EngineMetrics
from workers.simulated.publisher import END_SEQUENCE, EventPublisher
from workers.simulated.request import Request, pack_tokens
from workers.simulated.runtime import EngineRuntime

pytestmark = pytest.mark.integration

DEADLINE_S = 20.0
Frames = list[bytes]


@asynccontextmanager
async def client(kind: int, endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A connected socket."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.linger = 0
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield socket
    finally:
        socket.close()
        context.term()


@asynccontextmanager
async def publishing(
    *, buffer_steps: int = 100, topic: str = "kv"
) -> AsyncIterator[EventPublisher]:
    """A publisher on free ports with its replay service."""
    publisher = EventPublisher(
        endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        topic=topic,
        buffer_steps=buffer_steps,
    )
    service = asyncio.ensure_future(publisher.serve_replays())
    try:
        yield publisher
    finally:
        service.cancel()
        await asyncio.gather(service, return_exceptions=True)
        publisher.close()


async def replay(publisher: EventPublisher, start: int) -> list[Frames]:
    """All replies to one request, the end marker included."""
    assert publisher.replay_endpoint is not None
    async with client(zmq.DEALER, publisher.replay_endpoint) as dealer:
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        replies: list[Frames] = []
        while not replies or replies[-1][2] != END_SEQUENCE:
            replies.append(await dealer.recv_multipart())
    return replies


async def subscribed(publisher: EventPublisher, socket: zmq.asyncio.Socket) -> None:
    """Publish until the subscription has reached the publisher; a SUB joins late."""
    while not await socket.poll(10):
        publisher.publish(b"probe")


async def test_live_message_is_topic_sequence_payload() -> None:
    """Three frames; sequence numbers count without gaps."""
    async with publishing() as publisher, client(zmq.SUB, publisher.endpoint) as sub:
        await subscribed(publisher, sub)
        first = publisher._sequence
        publisher.publish(b"one")
        publisher.publish(b"two")
        frames: list[Frames] = []
        while len(frames) < 2:
            got = await sub.recv_multipart()
            if got[2] != b"probe":
                frames.append(got)
    assert frames == [
        [b"kv", first.to_bytes(8, "big"), b"one"],
        [b"kv", (first + 1).to_bytes(8, "big"), b"two"],
    ]


async def test_replay_answers_from_the_asked_sequence_and_ends() -> None:
    """Four frames a batch; the end marker has empty topic and payload."""
    async with publishing() as publisher:
        for number in range(5):
            publisher.publish(b"%d" % number)
        replies = await replay(publisher, 3)
    assert replies == [
        [b"", b"kv", (3).to_bytes(8, "big"), b"3"],
        [b"", b"kv", (4).to_bytes(8, "big"), b"4"],
        [b"", b"", END_SEQUENCE, b""],
    ]


@pytest.mark.parametrize(("start", "expected"), [(0, [7, 8, 9]), (8, [8, 9]), (50, [])])
async def test_replay_holds_the_last_batches_only(start: int, expected: list[int]) -> None:
    """What left the ring is lost: the first replayed number is then greater than asked."""
    async with publishing(buffer_steps=3) as publisher:
        for _ in range(10):
            publisher.publish(b"x")
        replies = await replay(publisher, start)
    assert [int.from_bytes(reply[2], "big") for reply in replies[:-1]] == expected


async def test_full_ring_is_replayed_whole() -> None:
    """Ten thousand batches reach a client that reads them all."""
    async with publishing(buffer_steps=10_000) as publisher:
        for _ in range(10_000):
            publisher.publish(b"x" * 50)
        assert len(await replay(publisher, 0)) == 10_001


async def test_malformed_replay_request_harms_nobody() -> None:
    """It is skipped and the next request is answered."""
    async with publishing() as publisher:
        assert publisher.replay_endpoint is not None
        publisher.publish(b"x")
        async with client(zmq.DEALER, publisher.replay_endpoint) as dealer:
            for junk in ([b"junk"], [b"", b"short"], [b"", b"", b"", b""]):
                await dealer.send_multipart(junk)
            await dealer.send_multipart([b"", bytes(8)])
            reply = await dealer.recv_multipart()
    assert reply[3] == b"x"


async def test_request_socket_gets_the_first_batch() -> None:
    """A REQ client, which can read one reply only, gets the asked batch."""
    async with publishing() as publisher:
        assert publisher.replay_endpoint is not None
        publisher.publish(b"x")
        async with client(zmq.REQ, publisher.replay_endpoint) as requester:
            await requester.send_multipart([bytes(8)])
            reply = await requester.recv_multipart()
    assert reply == [b"kv", bytes(8), b"x"]


async def test_publisher_connects_to_a_plain_address() -> None:
    """An endpoint without wildcard belongs to the subscriber, who binds it."""
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.linger = 0
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = EventPublisher(
        endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None, topic="t", buffer_steps=1
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await subscribed(publisher, sub)
            frames = await sub.recv_multipart()
    finally:
        publisher.close()
        sub.close()
        context.term()
    assert frames[0] == b"t"


def believed(payloads: list[bytes]) -> Counter[int]:
    """What a client that counts stored and removed knows."""
    resident: Counter[int] = Counter()
    for payload in payloads:
        for event in msgpack.unpackb(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    resident.update(event["block_hashes"])
                case "BlockRemoved":
                    resident.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    resident.clear()
    return +resident


class Finished:
    """A sink that only knows when its request is done."""

    finish_reason = "length"

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def admitted(self, hit_tokens: int) -> None:
        """Not of interest."""

    def token(self, position: int, *, last: bool) -> None:
        """Note the last one."""
        assert position >= 0
        if last:
            self.event.set()


async def test_live_view_replayed_view_and_pool_agree() -> None:
    """After evictions and a reset, listening and asking later tell the same, which is the truth."""
    cost = CostModel(
        step_overhead_s=1e-3,
        linear_s_per_token=0.0,
        weights_s=0.0,
        experts_s=0.0,
        expert_share=0.0,
        attention_s_per_pair=0.0,
        kv_read_s_per_token=0.0,
    )
    engine = Engine(
        EngineConfig(
            cost=cost,
            block_size_tokens=4,
            capacity_blocks=20,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            output_ids=range(100),
        )
    )
    async with publishing() as publisher, client(zmq.SUB, publisher.endpoint) as sub:
        nothing = encode_batch([], ts=0.0, encoding=EventEncoding.MAP)
        while not await sub.poll(10):
            publisher.publish(nothing)
        runtime = EngineRuntime(
            engine=engine,
            metrics=EngineMetrics("m"),
            publisher=publisher,
            encoding=EventEncoding.MAP,
            speedup=10.0,
            waiting_max=100,
        )
        task = asyncio.ensure_future(runtime.run())
        for number in range(12):
            prompt = pack_tokens([number % 3, *range(number % 5, 30)])
            request = Request(request_id=str(number), packed_prompt=prompt, output_tokens=9)
            finished = Finished()
            runtime.submit(request, finished)
            await finished.event.wait()
            if number == 6:
                assert engine.reset_prefix_cache()
        task.cancel()
        live: list[bytes] = []
        last = (publisher._sequence - 1).to_bytes(8, "big")
        sequence = b""
        while sequence != last:
            _, sequence, payload = await sub.recv_multipart()
            live.append(payload)
        replies = await replay(publisher, 0)
    truth = Counter(h for h in engine.pool._hash_of if h is not None)
    replayed = believed([reply[3] for reply in replies[:-1]])
    assert truth
    assert (truth, truth) == (believed(live), replayed)
