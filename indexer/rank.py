"""One data-parallel rank of one engine process: its events, its table, its slot."""

import time
from collections.abc import Callable
from typing import Final

import structlog

from indexer.approximate.learner import Learner
from indexer.approximate.no_events import NoEvents
from indexer.awaited import Awaited
from indexer.checkpoint_keeper import CheckpointKeeper
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import INSTANCE_LEASE_TTL_S
from indexer.contract.records import FleetRecord, HeartbeatReply, IndexCounters, SlotFlag, TooLate
from indexer.draining import Drain, RankLoad, obeyed
from indexer.engine.engine_metrics import EngineSample
from indexer.follower import Follower
from indexer.notices.judge import Judge
from indexer.pace import Pace
from indexer.plan import RankPlan
from indexer.publishing.publisher import Publisher
from indexer.publishing.room import Room
from indexer.table.changes import Delta
from indexer.table.holdings import Holdings
from indexer.table.tier_table import TIER_BLOCKS_MAX, TierTable
from indexer.telemetry import TableMeter, Telemetry

QUIET_S: Final = 600.0
"""An engine without a batch for so long is mentioned, once, although it may just be idle."""

BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, where there is such a clock."""


class Rank:
    """Keeps the lease of what its follower follows, as long as that is to be relied on.

    A sidecar that stood still for longer than its lease (stopped, suspended, a machine that was
    moved) does not know what the engine did meanwhile, and nobody credited it since the lease had
    ended. So it asks before it renews: the ring, or where there is none its own socket, because ZMQ
    keeps in order what has come, up to a bound, and drops only what is newer: once the queue was
    seen empty nothing is missing that a later batch would not show as a gap. Only if it was full
    the newest may be missing unseen, and then every block is doubted. What the answer took back
    must have left the index, too, before the lease makes it count again.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        publisher: Publisher,
        fleet: FleetRecord,
        telemetry: Telemetry,
        keeper: CheckpointKeeper | None,
        *,
        drain: Drain,
        learned_blocks_max: Callable[[], int],
    ) -> None:
        self.record = rank_plan.record
        self.publisher = publisher
        self.source = rank_plan.source
        holdings = Holdings(
            model_scope=fleet.model_scope,
            block_size_tokens=fleet.block_size_tokens,
            capacity_blocks=self.record.capacity_blocks,
            make_tier=tier_maker(rank_plan, fleet),
        )
        self._telemetry = telemetry
        self._drain = drain
        self._label = str(rank_plan.source.rank)
        self._learner = Learner(
            publisher,
            telemetry,
            rank=self._label,
            record=self.record,
            reuses_prefixes=rank_plan.reuses_prefixes,
            block_size_tokens=fleet.block_size_tokens,
            blocks_max=learned_blocks_max,
        )
        self._room = Room(
            telemetry,
            rank=self._label,
            instance_id=self.record.instance_id,
            canonical_blocks_per_engine_block=self.record.block_size_tokens
            / fleet.block_size_tokens,
            learned=self._learner.blocks,
            tier=lambda: self.follower.holdings.tier,
        )
        self.follower: Follower | NoEvents = (
            NoEvents(holdings)
            if self.record.learned
            else Follower(
                self.source,
                holdings,
                publisher,
                room=self._room,
                telemetry=telemetry,
                keeper=keeper,
            )
        )
        self._log = structlog.get_logger().bind(
            rank=self._label, instance_id=self.record.instance_id
        )
        self._meter = TableMeter(telemetry, self._label)
        self._judge = Judge(
            publisher,
            telemetry,
            rank=self._label,
            block_size_tokens=fleet.block_size_tokens,
            engine_block_size_tokens=self.record.block_size_tokens,
        )
        self._awaited = Awaited()
        self._pace = Pace()
        self._is_renewed = False
        self._sure_s = time.clock_gettime(BOOT_CLOCK)  # when the events were surely followed
        self._was_unsure = False
        self._is_quiet = False
        self._redis_ahead_s: float | None = None  # Redis time minus the clock of `_sure_s`
        self._sleep_level: int | None = None

    def published(self) -> list[BlockHash]:
        """All blocks to be published at this moment, parents before children."""
        return [*self.follower.holdings.published(), *self._learner.blocks.published()]

    def found_full(self) -> Delta:
        """Redis is out of memory: what gives way."""
        return self._room.found_full(self.follower.holdings.table)

    async def heartbeat(self, sample: EngineSample | None, asked_s: float) -> None:
        """Renew the lease, if that is due; the engine has just answered.

        Args:
            sample: its load; None when it tells none for this rank.
            asked_s: monotonic clock before the engine was asked for it.

        Raises:
            EngineRestarted: another engine process has answered.
        """
        if isinstance(self.follower, NoEvents):
            self.follower.look(sample)
        self._learner.look(sample, self.follower.holdings)
        self._awaited.look(sample, asked_s)
        if not self._is_sure():
            self._renewing(False, "events may have been missed")
            return
        if self.publisher.is_stale:
            self._renewing(False, "blocks that are gone are still in the index")
            return
        is_draining = self._drain.is_draining
        state = self._drain.flags()
        counters = None
        if sample is not None:
            counters = sample.counters
            if sample.sleep_level is not None:
                state |= SlotFlag.SLEEPING
            self._note_sleep(sample.sleep_level)
        if not self._pace.is_due(time.monotonic(), state):
            return
        holdings = self.follower.holdings
        index = IndexCounters(
            blocks=self._room.wanted_blocks(holdings.table),
            completeness_ratio=self._completeness_ratio(),
        )
        begun_s, sent_s = time.clock_gettime(BOOT_CLOCK), time.monotonic()
        known_s = None if self._redis_ahead_s is None else begun_s + self._redis_ahead_s
        try:
            reply = await self.publisher.membership.heartbeat(
                state, index, counters, self._awaited.ended(holdings.table), known_s
            )
        except REDIS_WEATHER as error:
            self._telemetry.redis_failures.labels("heartbeat").inc()
            self._renewing(False, str(error))
            return
        if reply is None:
            self._renewing(False, "the slot is lost")
            return
        self._redis_ahead_s = reply.now_s - begun_s
        if isinstance(reply, TooLate):
            self._note_late(reply.now_s - (known_s or 0.0))
            self._renewing(False, "the heartbeat came too late")
            return
        self._sure_s = begun_s
        self._renewing(True, "")
        load = RankLoad(reserved_requests=reply.reserved_requests, counters=counters)
        self._drain.heard(self._label, load, is_draining=is_draining)
        self._pace.heard(sent_s, state, reply)
        self._take(sent_s, reply)

    def _take(self, sent_s: float, reply: HeartbeatReply) -> None:
        """What Redis has told with its answer."""
        table = self.follower.holdings.table
        self._awaited.hear(reply.awaited, reply.reserved_requests, time.monotonic())
        self._telemetry.prefills_ended.labels(self._label).inc(reply.prefills_ended_count)
        self._judge.note(sent_s, reply, table)
        notices = obeyed(reply.notices, self._drain)
        if notices and (reports := self._learner.take(notices)):
            deltas, starts_over = self._judge.judge(reports, table)
            self.publisher.offer(deltas, None)
            if starts_over:
                self.follower.resync("notices")
        self.publisher.offer(self._room.hear(reply.budget_blocks, table), None)

    # -- what keeps a lease from being renewed ----------------------------------------------------

    def _is_sure(self) -> bool:
        """Whether the holdings are known to be up to date; else that is being asked.

        What is asked when a lease has ended is asked then, whatever else is being waited for: an
        answer that was under way when this process stood still knows nothing of that time.
        """
        since_s = time.clock_gettime(BOOT_CLOCK) - self._sure_s
        if since_s > INSTANCE_LEASE_TTL_S:
            self._note_late(since_s)
        is_sure = self.follower.is_sure
        if is_sure and self._was_unsure:
            self.publisher.expect_removals()
        self._was_unsure = not is_sure
        return is_sure

    def _note_late(self, since_s: float) -> None:
        """The lease has ended since it was last renewed, whatever kept us from it."""
        self._telemetry.late_renewals.labels(self._label).inc()
        self._log.warning("lease_had_ended", since_s=round(since_s, 3))
        self._sure_s = time.clock_gettime(BOOT_CLOCK)  # told once for each lease that ends
        self.follower.check()

    def stop_renewing(self) -> None:
        """The engine does not answer: its lease runs out unless it comes back as it was."""
        if self._is_renewed:
            self.follower.check()
        self._renewing(False, "the engine does not answer")

    def _note_sleep(self, level: int | None) -> None:
        if level != self._sleep_level:
            self._sleep_level = level
            self._telemetry.engine_asleep.labels(self._label).set(level is not None)
            self._log.info("sleep_level_changed", level=level)
        holdings = self.follower.holdings
        if level and (holdings.table or holdings.tier is not None):  # the cache is discarded
            self.publisher.offer([holdings.clear()], None)
        if level:
            self._learner.clear()

    def _renewing(self, renewed: bool, reason: str) -> None:
        if not renewed:
            self._pace.lost()
            self._drain.unheard(self._label)
        if renewed != self._is_renewed:
            self._is_renewed = renewed
            self._telemetry.lease_held.labels(self._label).set(renewed)
            self._log.info("lease_renewed" if renewed else "lease_not_renewed", reason=reason)

    def export(self) -> None:
        """Bring the metrics up to date."""
        self._telemetry.draining.labels(self._label).set(self._drain.is_draining)
        silence_s = self.follower.silence_s
        self._telemetry.silence_s.labels(self._label).set(silence_s)
        if (silence_s > QUIET_S) != self._is_quiet:
            self._is_quiet = not self._is_quiet
            self._log.info("engine_quiet" if self._is_quiet else "engine_heard_again")
        self._telemetry.pending_age_s.labels(self._label).set(self.publisher.pending_age_s)
        holdings, pending_count = self.follower.holdings, self.publisher.pending_count
        ratio = self._completeness_ratio()
        self._meter.export(holdings.table, pending_count, ratio, holdings.tier)

    def _completeness_ratio(self) -> float:
        """Of what the engine holds, known for sure: nothing, where only routers tell of it."""
        return 0.0 if self.record.learned else self.follower.holdings.completeness_ratio()


def tier_maker(rank_plan: RankPlan, fleet: FleetRecord) -> Callable[[], TierTable] | None:
    """Makes an empty tier of a rank; None where it has none."""
    media = rank_plan.tier_media
    if not media:
        return None
    size, tokens = fleet.block_size_tokens, rank_plan.tier_capacity_tokens
    blocks_max = TIER_BLOCKS_MAX if tokens is None else max(1, tokens // size)
    return lambda: TierTable(
        model_scope=fleet.model_scope, block_size_tokens=size, media=media, blocks_max=blocks_max
    )
