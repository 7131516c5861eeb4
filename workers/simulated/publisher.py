"""Publishes KV event batches over ZMQ as vLLM does: a PUB socket, and a ROUTER for replays.

Live, 3 frames: topic, sequence (8 bytes, big-endian), payload. A replay request comes from a
DEALER as ("", start sequence); the answer is one message ("", topic, sequence, payload) per
buffered batch from there on, and ("", "", 0xFF x 8, "") at the end.
"""

import asyncio
import logging
from collections import deque
from itertools import islice

import zmq
import zmq.asyncio

SEQUENCE_BYTES = 8
END_SEQUENCE = b"\xff" * SEQUENCE_BYTES
REPLAYS_PER_TURN = 256
"""Batches sent before other work of the process gets its turn: about 2 ms."""

HIGH_WATER_MARK = 100_000
"""vLLM's `hwm`; beyond it PUB drops silently."""

LINGER_MS = 500
"""How long closing waits for batches still on their way."""

logger = logging.getLogger(__name__)


class EventPublisherError(RuntimeError):
    """An endpoint cannot be used; the message names it."""


def binds(endpoint: str) -> bool:
    """Whether vLLM binds this endpoint; any other it connects to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class EventPublisher:
    """Sequence numbers count from 0 per publisher, without gaps.

    Attributes:
        endpoint: of the live socket; a wildcard port is replaced by the one bound.
        replay_endpoint: of the replay socket, likewise; None when there is none.
        topic: first frame of each live message.
        buffer_steps: batches kept for replay.
        high_water_mark: batches a slow subscriber may be behind before it loses some.
    """

    high_water_mark = HIGH_WATER_MARK

    def __init__(
        self, *, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int
    ) -> None:
        """Open the sockets.

        Raises:
            EventPublisherError: an endpoint is malformed or already in use.
        """
        self.topic = topic
        self.buffer_steps = buffer_steps
        self._topic = topic.encode()
        self._sequence = 0
        self._buffer: deque[bytes] = deque(maxlen=buffer_steps)
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self.endpoint = _open(self._pub, endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A whole replay must fit: past its limit a ROUTER drops without a word.
                self._replay.setsockopt(zmq.SNDHWM, 2 * (buffer_steps + 1))
                self.replay_endpoint = _open(self._replay, replay_endpoint, always_bind=True)
        except EventPublisherError:
            self.close()
            raise

    def publish(self, payload: bytes) -> None:
        """Send one batch and keep it for replay. Never blocks."""
        self._buffer.append(payload)
        frames = (self._topic, self._sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
        self._sequence += 1
        self._pub.send_multipart(frames, flags=zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled; a malformed one is logged and skipped."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:  # noqa: PLR2004  # identity, "", sequence
                logger.warning("replay request ignored: want 2 frames, empty and 8 bytes")
                continue
            await self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, socket: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        oldest = self._sequence - len(self._buffer)
        first = max(start, oldest)
        batches = list(islice(self._buffer, min(first - oldest, len(self._buffer)), None))
        for offset, payload in enumerate(batches):
            sequence = (first + offset).to_bytes(SEQUENCE_BYTES, "big")
            await socket.send_multipart((client, b"", self._topic, sequence, payload))
            if offset % REPLAYS_PER_TURN == REPLAYS_PER_TURN - 1:
                await asyncio.sleep(0)
        await socket.send_multipart((client, b"", b"", END_SEQUENCE, b""))

    def close(self) -> None:
        """Close the sockets; what is on its way gets half a second."""
        self._pub.close(LINGER_MS)
        if self._replay is not None:
            self._replay.close(LINGER_MS)
        self._context.term()


def _open(
    socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, *, always_bind: bool = False
) -> str:
    """Bind or connect by vLLM's rule; the endpoint as clients should be told it."""
    try:
        if not (always_bind or binds(endpoint)):
            socket.connect(endpoint)
            return endpoint
        socket.setsockopt(zmq.IPV6, "::" in endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EventPublisherError(f"event endpoint {endpoint}: {error}") from error
    if endpoint.endswith(":*"):
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
    return endpoint
