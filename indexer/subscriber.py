"""The engine's event sockets: every batch once and in order, or an explicit statement of loss.

SUB for live batches, DEALER for replays out of the publisher's ring. Live batches wait in the SUB
socket's own bounded queue while a replay is applied; what overflows there shows as a gap, and a gap
is replayed. A replay starts at the last batch delivered: when that comes back different, or not at
all, another engine process is answering. A replay is due at every new connection, at a gap, and
once in every silence (a subscription takes effect a little after it was made).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import xxhash
import zmq
import zmq.asyncio
import zmq.utils.monitor

from indexer.errors import EngineRestarted, ReplayFailed

LIVE_MESSAGES_MAX: Final = 20_000
"""Live batches that may wait in the SUB socket: twice the ring of a publisher with default size."""

REPLAY_MESSAGES_MAX: Final = 100_000
"""Replayed batches that may wait in the DEALER socket; the publisher drops what does not fit."""

REPLAY_SILENCE_S: Final = 5.0
"""Longest wait for the next replayed batch: a publisher serves replays between two live batches."""

REPLAY_ATTEMPTS: Final = 3
"""Replays that may fail in a row before the replay socket is given up."""

SILENCE_S: Final = 1.0
"""After so long without a message the ring is asked, once, whether something was missed."""

END_OF_REPLAY: Final = b"\xff" * 8
SEQUENCE_BYTES: Final = 8
LIVE_FRAMES: Final = 3  # topic, sequence, payload
REPLAY_FRAMES: Final = (3, 4)  # empty, topic (not from older publishers), sequence, payload


@dataclass(frozen=True, slots=True)
class Received:
    """The next batch."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches from `first` up to, not including, `resumes_at` are lost for good."""

    first: int
    resumes_at: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is not one of the protocol's; skipped."""

    frames_count: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay has ended; `failed` when it broke off, `given_up` when no more are tried."""

    failed: bool = False
    given_up: bool = False


Item = Received | Gap | Malformed | Replayed


class Subscriber:
    """Ordered batches of one data-parallel rank of one engine process."""

    def __init__(
        self, *, endpoint: str, bind: bool, replay_endpoint: str | None, topic: str
    ) -> None:
        """Open the sockets.

        Args:
            endpoint: where live batches come from.
            bind: the publisher connects to the endpoint.
            replay_endpoint: the publisher's ROUTER; None when it has none.
            topic: prefix of the topics to take.

        Raises:
            zmq.ZMQError: the endpoint cannot be used.
        """
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB, LIVE_MESSAGES_MAX)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._monitor = self._live.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._live, zmq.POLLIN)
        if bind:
            self._live.bind(endpoint)
        else:
            self._live.connect(endpoint)
        self._is_connected = False
        self._replay_due = False
        self._silence_checked = False
        self._failures_count = 0
        self._last: int | None = None  # sequence of the last batch delivered
        self._digests: dict[int, int] = {}  # of the last batches, to know one that comes twice

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    def check(self) -> bool:
        """Ask for a comparison with the ring, which ends in a `Replayed`; False without a ring."""
        self._replay_due = self._replay_endpoint is not None
        return self._replay_due

    async def receive(self) -> AsyncGenerator[Item, None]:
        """Deliver until another engine process answers.

        Raises:
            EngineRestarted: whatever was delivered is void.
        """
        frames: list[bytes] | None = None
        while True:
            # Looked at after a message was taken, too: it may have come through a new connection.
            await self._follow_connection()
            if self._replay_due and self._is_connected:
                async with aclosing(self._catch_up()) as items:
                    async for item in items:
                        yield item
                continue
            if frames is None:
                frames = await self._next_live()
                if frames is None and not self._silence_checked:
                    self._silence_checked = True
                    self._replay_due = self._replay_endpoint is not None
                continue
            self._silence_checked = False
            if self._wants_replay(frames):
                self._replay_due = True
                while self._replay_due:
                    async with aclosing(self._catch_up()) as items:
                        async for item in items:
                            yield item
            for item in self._take(frames):
                yield item
            frames = None

    # -- live -------------------------------------------------------------------------------------

    async def _follow_connection(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = await zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not self._is_connected:
                continue
            self._silence_checked = False
            if self._replay_endpoint is not None:
                self._replay_due = True
            elif self._last is not None:
                raise EngineRestarted("a new connection, and no replay socket to tell what it is")

    async def _next_live(self) -> list[bytes] | None:
        """The next message; None after a silence or a change of the connection."""
        try:
            return await self._live.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            await self._poller.poll(SILENCE_S * 1000)
        try:
            return await self._live.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _wants_replay(self, frames: list[bytes]) -> bool:
        """Whether a message does not simply follow the last one, and the ring can tell why."""
        message = _parse(frames, (LIVE_FRAMES,))
        if message is None or self._replay_endpoint is None:
            return False
        return message[0] != self._next and not self._is_known(*message)

    def _take(self, frames: list[bytes]) -> list[Item]:
        """What a live message amounts to, after a replay where one was wanted."""
        message = _parse(frames, (LIVE_FRAMES,))
        if message is None:
            return [Malformed(len(frames))]
        sequence, payload = message
        if sequence == self._next:
            return [self._deliver(sequence, payload)]
        if sequence > self._next:
            gap = Gap(self._next, sequence)
            return [gap, self._deliver(sequence, payload)]
        if self._replay_endpoint is None and not self._is_known(sequence, payload):
            raise EngineRestarted(f"sequence went back from {self._last} to {sequence}")
        return []

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last + 1

    def _deliver(self, sequence: int, payload: bytes) -> Received:
        self._last = sequence
        self._digests[sequence] = xxhash.xxh3_64_intdigest(payload)
        if len(self._digests) > LIVE_MESSAGES_MAX:
            del self._digests[next(iter(self._digests))]
        return Received(sequence, payload)

    def _is_known(self, sequence: int, payload: bytes) -> bool:
        return self._digests.get(sequence) == xxhash.xxh3_64_intdigest(payload)

    # -- replay -----------------------------------------------------------------------------------

    async def _catch_up(self) -> AsyncGenerator[Item, None]:
        """Compare the last batch with the ring's, deliver what the ring holds behind it.

        Raises:
            EngineRestarted: the ring does not hold the last batch as it was delivered.
        """
        start, is_first = self._last or 0, True
        try:
            async with aclosing(self._replay(start)) as replies:
                async for sequence, payload in replies:
                    for item in self._compare(sequence, payload, start, is_first=is_first):
                        yield item
                    is_first = False
        except ReplayFailed:
            # Progress was kept; the next attempt goes on from there.
            self._failures_count = self._failures_count + 1 if is_first else 1
            if self._failures_count < REPLAY_ATTEMPTS:
                yield Replayed(failed=True)
                return
            self._replay_endpoint = None
            self._replay_due = False
            yield Replayed(failed=True, given_up=True)
            return
        if is_first and self._last is not None:
            raise EngineRestarted(f"the replay does not hold batch {self._last}")
        self._failures_count = 0
        self._replay_due = False
        yield Replayed()

    def _compare(self, sequence: int, payload: bytes, start: int, *, is_first: bool) -> list[Item]:
        """What a replayed batch amounts to."""
        if is_first and sequence == start == self._last:
            if not self._is_known(sequence, payload):
                raise EngineRestarted(f"batch {sequence} is another one now")
            return []
        if sequence < self._next:
            return []
        if sequence == self._next:
            return [self._deliver(sequence, payload)]
        if not is_first:
            raise ReplayFailed(f"the replay skipped {self._next} to {sequence}")
        gap = Gap(self._next, sequence)
        return [gap, self._deliver(sequence, payload)]

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Batches of the ring from a sequence on.

        Raises:
            ReplayFailed: no answer, or it broke off before the end marker.
        """
        assert self._replay_endpoint is not None
        socket = self._socket(zmq.DEALER, REPLAY_MESSAGES_MAX)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            while True:
                if not await socket.poll(REPLAY_SILENCE_S * 1000):
                    raise ReplayFailed(f"{self._replay_endpoint} is silent")
                frames = await socket.recv_multipart()
                if len(frames) in REPLAY_FRAMES and frames[-2] == END_OF_REPLAY:
                    return
                message = _parse(frames, REPLAY_FRAMES)
                if message is None:
                    raise ReplayFailed(f"{self._replay_endpoint} answered {len(frames)} frames")
                yield message
        finally:
            socket.close(linger=0)

    def _socket(self, kind: int, messages_max: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, messages_max)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket


def _parse(frames: list[bytes], frame_counts: tuple[int, ...]) -> tuple[int, bytes] | None:
    """Sequence and payload of a message, None when it is none of the protocol's."""
    if len(frames) not in frame_counts or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
