"""The engine's event sockets: every batch once and in order, or an explicit statement of loss.

SUB for live batches; replays out of the publisher's ring (`ring.py`). Live batches wait in the SUB
socket's own bounded queue while a replay is applied; what overflows there shows as a gap, and a gap
is replayed. A replay starts at the last batch delivered: when that comes back different, or not at
all, another engine process is answering. A replay is due at every new connection, at a gap, and
once in every silence (a subscription takes effect a little after it was made).
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

import zmq.asyncio

from indexer.engine.history import (
    Again,
    Drained,
    History,
    Item,
    Malformed,
    Position,
    Replayed,
    Resumed,
    Resynchronised,
    digest_of,
)
from indexer.engine.live_socket import FOREIGN, LIVE_MESSAGES_MAX, LiveSocket
from indexer.engine.ring import LIVE_FRAMES, Ring, parse
from indexer.errors import EngineRestarted, ReplayFailed

REPLAY_ATTEMPTS: Final = 3
"""Replays that may fail in a row before the replay socket is given up."""

LIVE_SILENCE_S: Final = 1.0
"""After so long without a message the ring is asked, once, whether something was missed."""

STALLED_S: Final = 1.0
"""After so long without a batch a replay holds up the live ones."""

DRAINED_S: Final = 0.1
"""After so long without a message none is left in the buffers of ZMQ and of the two kernels."""


class Subscriber:
    """Ordered batches of one data-parallel rank of one engine process."""

    def __init__(
        self,
        *,
        endpoint: str,
        bind: bool,
        replay_endpoint: str | None,
        topic: str | None,
        resume: Position | None = None,
    ) -> None:
        """Open the sockets.

        Args:
            endpoint: where live batches come from.
            bind: the publisher connects to the endpoint.
            replay_endpoint: the publisher's ROUTER; None when it has none.
            topic: topic of the batches; None takes any.
            resume: go on behind this batch if it is this engine's, which only a ring can tell:
                answered by a `Resumed` before any batch.

        Raises:
            zmq.ZMQError: the endpoint cannot be used.
        """
        assert resume is None or replay_endpoint is not None, "only a ring can tell"
        self._context = zmq.asyncio.Context()
        self._ring = None if replay_endpoint is None else Ring(self._context, replay_endpoint)
        self._live = LiveSocket(self._context, endpoint=endpoint, bind=bind, topic=topic)
        self._history = History()
        self._resume = resume
        self._replay_due = False  # as soon as there is a connection
        self._replay_needed = False  # before the message in hand, whatever the connection
        self._resync_due = False
        self._silence_checked = False
        self._checks_count = 0
        self._failures_count = 0
        self._undrained: int | None = None  # messages taken since `check`, without a ring
        self._replayed_s: float | None = None  # last progress of the replay under way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.close()
        self._context.destroy(linger=0)

    def position(self, sequence: int) -> Position | None:
        """A batch delivered lately, to resume behind it; None when only a lost ring could tell."""
        return None if self._ring is None else self._history.position(sequence)

    def check(self) -> int:
        """Ask whether something was missed.

        Answered by a `Replayed` that counts as many checks as are returned here, or more; without
        a ring by a `Drained`.
        """
        self._checks_count += 1
        if self._ring is not None:
            self._replay_due = True
        elif self._undrained is None:
            self._undrained = 0
        return self._checks_count

    @property
    def is_stalled(self) -> bool:
        """Whether live batches wait for a replay that does not get on."""
        replayed_s = self._replayed_s
        return replayed_s is not None and time.monotonic() - replayed_s > STALLED_S

    def resync(self) -> None:
        """Ask for all batches since the engine's first as `Again`; ends with `Resynchronised`."""
        self._resync_due = True

    async def receive(self) -> AsyncGenerator[Item, None]:
        """Deliver until another engine process answers.

        Raises:
            EngineRestarted: whatever was delivered is void.
        """
        frames: list[bytes] | None = None
        while True:
            # Looked at after a message was taken, too: it may have come through a new connection.
            await self._follow_connection()
            if due := self._due():
                self._replayed_s = time.monotonic()
                async with aclosing(due) as items:
                    async for item in items:
                        self._replayed_s = time.monotonic()
                        yield item
                self._replayed_s = None
            elif frames is None:
                frames = await self._next_live()
                if (drained := self._drained(frames)) is not None:
                    yield drained
            else:
                for item in self._take(frames):
                    yield item
                frames = None

    def _due(self) -> AsyncGenerator[Item, None] | None:
        """What has to be asked of the ring before anything else."""
        if self._replay_needed or (self._replay_due and self._live.is_connected):
            return self._catch_up()
        if self._resync_due and (self._live.is_connected or self._ring is None):
            return self._start_over()
        return None

    # -- live -------------------------------------------------------------------------------------

    async def _follow_connection(self) -> None:
        if not await self._live.has_connected():
            return
        self._silence_checked = False
        if self._ring is not None:
            self._replay_due = True
        elif self._history.last is not None:
            raise EngineRestarted("a new connection, and no replay socket to tell what it is")

    async def _next_live(self) -> list[bytes] | None:
        """The next message, and whether the ring must be asked before it is taken."""
        silence_s = LIVE_SILENCE_S if self._undrained is None else DRAINED_S
        frames = await self._live.next(silence_s)
        if frames is not None:
            self._silence_checked = False
            self._replay_needed = self._wants_replay(frames)
        elif not self._silence_checked:
            self._silence_checked = True
            self._replay_due = self._ring is not None
        return frames

    def _drained(self, frames: list[bytes] | None) -> Drained | None:
        """Whether a `check` without a ring has its answer."""
        if self._undrained is None:
            return None
        self._undrained += frames is not None
        overflowed = self._undrained >= LIVE_MESSAGES_MAX
        if frames is not None and not overflowed:
            return None
        self._undrained = None
        return Drained(overflowed)

    def _wants_replay(self, frames: list[bytes]) -> bool:
        """Whether a message does not simply follow the last one, and the ring can tell why."""
        message = parse(frames, LIVE_FRAMES)
        if message is None or self._ring is None:
            return False
        return message[0] != self._history.next and not self._history.is_known(*message)

    def _take(self, frames: list[bytes]) -> list[Item]:
        """What a live message amounts to, after a replay where one was wanted."""
        if frames is FOREIGN:
            return []
        message = parse(frames, LIVE_FRAMES)
        if message is None:
            return [Malformed(len(frames))]
        if self._ring is None and message[0] < self._history.next:
            if self._history.is_known(*message):
                return []
            last = self._history.last
            raise EngineRestarted(f"sequence went back from {last} to {message[0]}")
        return self._history.take_live(*message)

    # -- the ring ---------------------------------------------------------------------------------

    async def _catch_up(self) -> AsyncGenerator[Item, None]:
        """Compare the last batch with the ring's, deliver what the ring holds behind it.

        Raises:
            EngineRestarted: the ring does not hold the last batch as it was delivered.
        """
        assert self._ring is not None
        is_first, checks, filled_count = True, self._checks_count, 0
        try:
            if self._resume is not None:
                yield await self._resumed(self._ring, self._resume)
            last = self._history.last
            async with aclosing(self._ring.batches(last or 0)) as replies:
                async for sequence, payload in replies:
                    for item in self._history.take_replayed(sequence, payload, is_first=is_first):
                        filled_count += last is not None
                        yield item
                    is_first = False
        except ReplayFailed:
            # Progress was kept; the next attempt goes on from there.
            self._failures_count = self._failures_count + 1 if is_first else 1
            if self._failures_count < REPLAY_ATTEMPTS:
                yield Replayed(failed=True)
                return
            self._ring = None
            self._replay_due = self._replay_needed = False
            if self._resume is not None:
                self._resume = None
                yield Resumed(refused="the replay socket does not answer")
            yield Replayed(failed=True, given_up=True, checks=self._checks_count)
            return
        if is_first and last is not None:
            raise EngineRestarted(f"the replay does not hold batch {last}")
        self._failures_count = 0
        self._replay_due = checks < self._checks_count
        self._replay_needed = False
        yield Replayed(checks=checks, filled_count=filled_count)

    async def _resumed(self, ring: Ring, position: Position) -> Resumed:
        """Take the position over unless the ring holds another batch there, or none.

        A ring that begins later says nothing against it: what follows will be a gap.
        """
        refused: str | None = f"the engine has not come to batch {position.sequence} yet"
        async with aclosing(ring.batches(position.sequence)) as replies:
            async for sequence, payload in replies:
                if sequence > position.sequence or digest_of(payload) == position.digest:
                    refused = None
                else:
                    refused = f"batch {position.sequence} is another one now"
                break
        self._resume = None
        if refused is None:
            self._history.resume(position)
        return Resumed(refused)

    async def _start_over(self) -> AsyncGenerator[Item, None]:
        """Deliver the engine's whole history once more, if the ring still holds it.

        The place in the history moves only when all of it came.

        Raises:
            EngineRestarted: the ring does not hold the batches that were delivered.
        """
        self._resync_due = False
        if self._ring is None:
            yield Resynchronised("there is no replay socket")
            return
        again = History()
        try:
            async with aclosing(self._ring.batches(0)) as replies:
                async for sequence, payload in replies:
                    if again.last is None and sequence > 0:
                        yield Resynchronised(f"the ring begins at batch {sequence}")
                        return
                    # Only compares: what is new here is delivered by a replay if this breaks off.
                    if sequence < self._history.next:
                        self._history.take_replayed(sequence, payload, is_first=False)
                    again.take_replayed(sequence, payload, is_first=False)
                    yield Again(sequence, payload)
        except ReplayFailed as error:
            yield Resynchronised(str(error))
            return
        if again.next < self._history.next:
            raise EngineRestarted(f"the replay does not hold batch {self._history.last}")
        self._history = again
        yield Resynchronised()
