"""The engine's replay socket: batches of its ring, asked for by sequence; and the frames of both.

A publisher keeps its last batches (vLLM: 10,000) and sends them again from a sequence on.
"""

from collections.abc import AsyncGenerator
from typing import Final

import zmq
import zmq.asyncio

from indexer.errors import ReplayFailed

REPLAY_MESSAGES_MAX: Final = 100_000
"""Replayed batches that may wait in the DEALER socket; the publisher drops what does not fit."""

REPLAY_SILENCE_S: Final = 5.0
"""Longest wait for the next replayed batch: a publisher serves replays between two live batches."""

END_OF_REPLAY: Final = b"\xff" * 8
SEQUENCE_BYTES: Final = 8
LIVE_FRAMES: Final = (3,)  # topic, sequence, payload
REPLAY_FRAMES: Final = (3, 4)  # empty, topic (not from older publishers), sequence, payload


class Ring:
    """Replays of one data-parallel rank."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint

    async def batches(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Sequence and payload of what the ring holds from a sequence on.

        Raises:
            ReplayFailed: no answer, it broke off before the end marker, or it goes back.
        """
        least = start
        socket = open_socket(self._context, zmq.DEALER, REPLAY_MESSAGES_MAX)
        try:
            socket.connect(self._endpoint)
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            while True:
                if not await socket.poll(REPLAY_SILENCE_S * 1000):
                    raise ReplayFailed(f"{self._endpoint} is silent")
                frames = await socket.recv_multipart()
                if len(frames) in REPLAY_FRAMES and frames[-2] == END_OF_REPLAY:
                    return
                message = parse(frames, REPLAY_FRAMES)
                if message is None:
                    raise ReplayFailed(f"{self._endpoint} answered {len(frames)} frames")
                if message[0] < least:
                    raise ReplayFailed(f"{self._endpoint} answered {message[0]}, not {least}")
                least = message[0] + 1
                yield message
        finally:
            socket.close(linger=0)


def open_socket(context: zmq.asyncio.Context, kind: int, messages_max: int) -> zmq.asyncio.Socket:
    """A socket for messages of an engine, at most so many of which wait."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, messages_max)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def parse(frames: list[bytes], frame_counts: tuple[int, ...]) -> tuple[int, bytes] | None:
    """Sequence and payload of a message, None when it is none of the protocol's."""
    if len(frames) not in frame_counts or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
