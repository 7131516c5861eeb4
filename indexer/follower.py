"""Follows the events of one rank, subscriber -> holdings -> publisher, and recovers from losses.

next batch                        applied, what it changes is published
batches lost for good             every block doubted, `Holdings.lose`
too many unexplained notices      the whole history read again, else every block doubted
started with a checkpoint           used once the ring holds the batch behind which it was taken
paused, or the engine was away    the ring is asked before anybody relies on the holdings
"""

import asyncio
import contextlib
import time
from typing import Final

import structlog

from indexer.checkpoint_keeper import CheckpointKeeper
from indexer.engine.event_source import EventSource, must_bind, reachable
from indexer.engine.history import (
    Again,
    Drained,
    Gap,
    Item,
    Malformed,
    Position,
    Received,
    Replayed,
    Resumed,
    Resynchronised,
)
from indexer.engine.subscriber import Subscriber
from indexer.engine.vllm_events import Batch, decode_batch
from indexer.errors import EngineRestarted, MalformedBatch
from indexer.publishing.publisher import Publisher
from indexer.publishing.room import Room
from indexer.table.changes import Delta
from indexer.table.holdings import Holdings
from indexer.telemetry import Telemetry

WITHOUT_REPLAY: Final = "a gap in the events takes this index back until the engine shows it again"


class Follower:
    """What a rank holds, kept up with its events.

    Attributes:
        holdings: replaced when those of a checkpoint are used.
    """

    def __init__(
        self,
        source: EventSource,
        holdings: Holdings,
        publisher: Publisher,
        *,
        room: Room,
        telemetry: Telemetry,
        keeper: CheckpointKeeper | None,
    ) -> None:
        self.holdings = holdings
        self._room = room
        self._source = source
        self._publisher = publisher
        self._telemetry = telemetry
        self._keeper = keeper
        self._label = str(source.rank)
        self._log = structlog.get_logger().bind(rank=self._label, instance_id=publisher.instance_id)
        self._subscriber: Subscriber | None = None
        self._saved: Holdings | None = None  # read, but not yet known to be of this process
        self._is_void = False
        self._checks_wanted: int | None = None
        self._resync_began_s = 0.0
        self._heard_s = time.monotonic()

    async def receive(self, engine_host: str) -> None:
        """Follow the engine's events until cancelled.

        Raises:
            EngineRestarted: another engine process answers.
        """
        try:
            async with (
                await self._subscribe(engine_host) as subscriber,
                contextlib.aclosing(subscriber.receive()) as items,
            ):
                self._subscriber = subscriber
                async for item in items:
                    self._take(item)
                    await asyncio.sleep(0)  # a long replay must not keep heartbeats waiting
        except EngineRestarted:
            self._is_void = True
            raise

    async def keep_checkpoint(self) -> None:
        """Write checkpoints until cancelled, if there is where to."""
        if self._keeper is not None:
            await self._keeper.run(self._current)

    def _current(self) -> tuple[Position, Holdings] | None:
        sequence = self.holdings.sequence
        if self._is_void or self._subscriber is None or sequence is None:
            return None
        position = self._subscriber.position(sequence)
        return position and (position, self.holdings)

    async def _subscribe(self, engine_host: str) -> Subscriber:
        source = self._source
        endpoint = reachable(source.endpoint, engine_host)
        replay = source.replay_endpoint and reachable(source.replay_endpoint, engine_host)
        bind = await must_bind(source.endpoint)
        self._telemetry.replay_available.labels(self._label).set(replay is not None)
        self._log.info("events_subscribed", endpoint=endpoint, bind=bind, replay_endpoint=replay)
        resume = None
        if replay is None:
            self.holdings.lose()  # until the engine's first batch is seen
            self._log.warning(
                "replay_unavailable",
                effect=WITHOUT_REPLAY,
                remedy="set replay_endpoint in the engine's --kv-events-config",
            )
        elif self._keeper is not None and (found := await self._keeper.read(self.holdings)):
            resume, self._saved = found
        return Subscriber(
            endpoint=endpoint,
            bind=bind,
            replay_endpoint=replay,
            topic=source.topic,
            resume=resume,
        )

    # -- receive -> apply -> publish --------------------------------------------------------------

    def _take(self, item: Item) -> None:
        match item:
            case Received(sequence, payload):
                self._heard_s = time.monotonic()
                self._apply(sequence, self._decode(sequence, payload))
            case Again(sequence, payload):
                batch = self._decode(sequence, payload)
                events = () if batch is None else batch.events
                self.holdings.apply_again(sequence, events, is_whole=_is_whole(batch))
            case Gap(first, resumes_at):
                self._telemetry.gaps.labels(self._label).inc()
                self._telemetry.batches_lost.labels(self._label).inc(resumes_at - first)
                self._lose("history_lost", first=first, batches=resumes_at - first)
            case Malformed(frames_count):
                self._telemetry.events_malformed.labels(self._label).inc()
                self._log.warning("message_malformed", frames=frames_count)
            case Replayed():
                self._note_replay(item)
            case Drained(overflowed):
                self._checks_wanted = None
                if overflowed:  # the newest may be missing, and no later one shows it yet
                    self._lose("queue_overflowed")
            case Resynchronised(failure):
                self._note_resync(failure)
            case Resumed(refused):
                self._note_resume(refused)

    def _apply(self, sequence: int, batch: Batch | None) -> None:
        events, ts_s = ((), None) if batch is None else (batch.events, batch.ts_s)
        deltas = self.holdings.apply(sequence, events)
        deltas.append(self._room.keep(self.holdings.table))
        self._publisher.offer(deltas, ts_s)
        if not _is_whole(batch):
            self._lose("removals_unreadable", sequence=sequence)

    def _decode(self, sequence: int, payload: bytes) -> Batch | None:
        """A batch; None when it cannot be read."""
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self._telemetry.events_malformed.labels(self._label).inc()
            self._log.warning("batch_malformed", sequence=sequence, error=str(error))
            return None
        self._telemetry.batches.labels(self._label).inc()
        if batch.unknown_count:
            self._telemetry.events_unknown.labels(self._label).inc(batch.unknown_count)
        if batch.malformed_count:
            self._telemetry.events_malformed.labels(self._label).inc(batch.malformed_count)
            self._log.warning("events_malformed", sequence=sequence)
        return batch

    def _lose(self, event: str, **details: int) -> None:
        """Any block may have gone unnoticed: none is claimed until the engine shows it again."""
        published_count = self.holdings.table.published_count
        self._publisher.offer([self.holdings.lose()], None)
        self._log.warning(event, blocks_withdrawn=published_count, **details)

    # -- what the ring says -----------------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """Since the engine's last batch, or since the beginning."""
        return time.monotonic() - self._heard_s

    def check(self) -> None:
        """Have it made sure that nothing was missed; `is_sure` is False until then."""
        if self._subscriber is not None:  # else nothing was followed yet that could be missed
            self._checks_wanted = self._subscriber.check()

    @property
    def is_sure(self) -> bool:
        """Whether checks have been answered and no replay holds up live batches."""
        is_stalled = self._subscriber is not None and self._subscriber.is_stalled
        return self._checks_wanted is None and not is_stalled

    def resync(self, cause: str) -> None:
        """Read the whole history again, because the holdings seem to be wrong."""
        if self._subscriber is not None:
            self._telemetry.resyncs.labels(self._label, cause).inc()
            self._log.warning("resync_begun", cause=cause)
            self._resync_began_s = time.monotonic()
            self._subscriber.resync()

    def _note_replay(self, item: Replayed) -> None:
        is_answer = not item.failed or item.given_up
        if is_answer and self._checks_wanted is not None and item.checks >= self._checks_wanted:
            self._checks_wanted = None
        if item.filled_count:
            self._log.info("gap_filled", batches=item.filled_count)
        outcome = "failed" if item.failed else "complete"
        self._telemetry.replays.labels(self._label, outcome).inc()
        if item.given_up:
            self._telemetry.replay_available.labels(self._label).set(0)
            self._log.warning(
                "replay_given_up",
                endpoint=self._source.replay_endpoint,
                reason="the replay socket does not answer",
                effect=WITHOUT_REPLAY,
            )

    def _note_resync(self, failure: str | None) -> None:
        if failure is None:
            delta, outcome = self.holdings.resynchronised(), "read again"
        else:
            delta, outcome = self.holdings.not_resynchronised(), "every block doubted"
        self._publisher.offer([delta, self._room.keep(self.holdings.table)], None)
        self._log.warning(
            "resync_ended",
            outcome=outcome,
            reason=failure,
            blocks_added=len(delta.added),
            blocks_removed=len(delta.removed),
            took_s=round(time.monotonic() - self._resync_began_s, 3),
        )

    def _note_resume(self, refused: str | None) -> None:
        saved, self._saved = self._saved, None
        assert saved is not None, "resumed from nothing"
        assert self._keeper is not None, "read by nobody"
        self._keeper.judged(refused, saved.table.published_count)
        if refused is None:
            self.holdings = saved
            added = Delta(added=saved.published())
            self._publisher.offer([added, self._room.keep(saved.table)], None)


def _is_whole(batch: Batch | None) -> bool:
    """Whether no removal can have been overlooked in it; without one nothing is claimed wrongly."""
    return batch is not None and not batch.hides_removals
