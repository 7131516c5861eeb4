"""Names of the sidecar's metrics, and its structured log.

Log events are past-tense verbs; every line of a rank carries `rank` and `instance_id`.
"""

import logging
import sys
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from indexer.table.block_table import BlockTable
from indexer.table.tier_table import TierTable

LAG_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Telemetry:
    """All metrics of one sidecar process; those of one rank have the label `rank`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._name_events()
        self._name_losses()
        self._name_learned()
        self._name_index()
        self._name_process()

    def _process_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"timestable_indexer_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._process_counter(name, text, "rank", *labels)

    def _gauge(self, name: str, text: str, label: str = "rank") -> Gauge:
        labels = (label,) if label else ()
        return Gauge(f"timestable_indexer_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"timestable_indexer_{name}",
            text,
            ("rank",),
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )

    def _name_events(self) -> None:
        """What the engine says."""
        self.batches = self._counter("batches", "Event batches applied.")
        self.blocks_stored = self._counter("blocks_stored", "Block stores the engine announced.")
        self.blocks_removed = self._counter(
            "blocks_removed", "Block removals the engine announced."
        )
        self.blocks_refused = self._counter(
            "blocks_refused", "Stores not taken: no tokens, or a full table."
        )
        self.events_unknown = self._counter("events_unknown", "Events of a type not known here.")
        self.events_malformed = self._counter(
            "events_malformed", "Events or messages not readable."
        )
        self.unknown_parents = self._counter(
            "unknown_parents", "Stores that wait for their parent."
        )
        self.unknown_removals = self._counter(
            "unknown_removals", "Removals of blocks not known here."
        )
        self.table_blocks = self._gauge("table_blocks", "Engine blocks in the table.")
        self.waiting_blocks = self._gauge("waiting_blocks", "Blocks whose parent is not known.")
        self.silence_s = self._gauge(
            "engine_silence_seconds", "Since the engine's last batch; an idle one says nothing."
        )
        self.draining = self._gauge("draining", "1 while no new request shall come.")
        self.engine_asleep = self._gauge("engine_asleep", "1 while the engine sleeps: no requests.")

    def _name_losses(self) -> None:
        """What was lost, and how it was made good."""
        self.gaps = self._counter("gaps", "Losses of batches that no replay could cover.")
        self.batches_lost = self._counter("batches_lost", "Batches in those gaps.")
        self.replays = self._counter("replays", "Replays asked for.", "outcome")
        self.replay_available = self._gauge(
            "replay_available", "1 when lost batches can be replayed."
        )
        self.completeness = self._gauge(
            "completeness_ratio", "Share of what the engine may hold that is surely known."
        )
        self.blocks_set_aside = self._gauge(
            "blocks_set_aside", "Blocks in doubt since a loss: not published until confirmed."
        )
        self.blocks_confirmed = self._counter(
            "blocks_confirmed", "Blocks in doubt that the engine showed to be there."
        )
        self.resyncs = self._counter(
            "resyncs", "Histories read again from their beginning.", "cause"
        )
        self.notices = self._counter("notices", "What routers found to differ, judged.", "verdict")
        self.blocks_credited = self._counter(
            "blocks_credited", "Canonical blocks published on an engine's report alone."
        )
        self.late_renewals = self._counter(
            "late_renewals", "Leases that had ended before they were renewed."
        )
        self.prefills_ended = self._counter(
            "prefills_ended", "Prefills told to routers to have ended, by the block they awaited."
        )
        self.checkpoint_loads = self._counter(
            "checkpoint_loads", "Checkpoints looked for at a start.", "outcome"
        )
        self.checkpoint_failures = self._counter(
            "checkpoint_failures", "Checkpoints that were not written."
        )
        self.checkpoint_bytes = self._gauge(
            "checkpoint_bytes", "Size of the checkpoint last written."
        )
        self.checkpoint_age_s = self._gauge(
            "checkpoint_age_seconds", "Since the checkpoint was written."
        )

    def _name_learned(self) -> None:
        """What no event tells of."""
        self.learned_blocks = self._gauge(
            "learned_blocks", "Canonical blocks published because routers say they were computed."
        )
        self.computed_notices = self._counter(
            "computed_notices", "Chains that routers say were computed.", "outcome"
        )
        self.engines = self._gauge("engines", "Engines on the list of this process.", "")
        self.engine_failures = self._process_counter(
            "engine_failures", "Engines given up for a while: they cannot be indexed as they are."
        )
        self.list_failures = self._process_counter(
            "engine_list_failures", "Times the list of engines could not be read."
        )

    def _name_index(self) -> None:
        """What is published, and how far behind it is."""
        self.published = self._counter(
            "published_blocks", "Block changes Redis has taken.", "change"
        )
        self.republishes = self._counter("republishes", "Whole tables published again.", "cause")
        self.publish_s = self._histogram("publish_seconds", "One write to the index.")
        self.lag_s = self._histogram(
            "lag_seconds", "Oldest unpublished engine batch until published."
        )
        self.index_blocks = self._gauge("index_blocks", "Canonical blocks to be published.")
        self.pending_blocks = self._gauge("pending_blocks", "Block changes not yet written.")
        self.pending_age_s = self._gauge(
            "pending_age_seconds", "Age of the oldest engine batch not yet wholly published."
        )
        self.blocks_withheld = self._gauge(
            "blocks_withheld", "Engine blocks not published for want of room in Redis."
        )
        self.index_budget_blocks = self._gauge(
            "index_budget_blocks", "Canonical blocks that may be published; -1 for no limit."
        )
        self.blocks_trimmed = self._counter("blocks_trimmed", "Engine blocks withheld so far.")
        self.tier_blocks = self._gauge(
            "tier_blocks", "Canonical blocks published that the engine can load from a tier."
        )
        self.tier_blocks_refused = self._counter(
            "tier_blocks_refused",
            "Writes to a tier not taken: unknown content, or a full table.",
        )
        self.tier_blocks_forgotten = self._counter(
            "tier_blocks_forgotten", "Engine blocks taken for gone: more than the tier holds."
        )
        self.oom_trims = self._counter(
            "oom_trims", "Times Redis was out of memory and blocks gave way."
        )
        self.lease_held = self._gauge("lease_held", "1 while the instance's lease is renewed.")
        self.fleet_full = self._gauge(
            "fleet_full", "1 while the fleet has no slot for this instance."
        )

    def _name_process(self) -> None:
        """What concerns the whole process, or the fleet."""
        self.index_bytes = self._gauge(
            "index_bytes",
            "What a partition of the index takes; told by the one sidecar that sweeps.",
            "partition",
        )
        self.index_bytes_per_membership = self._gauge(
            "index_bytes_per_membership", "What one (block, instance) takes, likewise.", ""
        )
        self.redis_evicts = self._gauge(
            "redis_evicts",
            "Redis servers of this fleet that may drop keys of the index by themselves.",
            "",
        )
        self.restarts = self._process_counter("restarts", "New engine processes seen.")
        self.redis_failures = self._process_counter(
            "redis_failures", "Redis calls that failed.", "call"
        )
        self.scrape_failures = self._process_counter(
            "scrape_failures", "Times the engine did not answer."
        )
        self.steps = self._counter("steps", "Loads the engine told after a step.")
        self.steps_malformed = self._process_counter(
            "steps_malformed", "Messages about steps that are not readable."
        )
        self.steps_foreign = self._process_counter(
            "steps_foreign", "Messages about steps of another process than the engine's."
        )
        self.sweeps = self._process_counter("sweeps", "Dead slots swept and freed.")
        self.reaped = self._process_counter(
            "reaped_reservations", "Reservations of dead routers taken back."
        )
        self.balanced_slots = self._process_counter(
            "balanced_slots", "Slots whose counters differed from the ledgers and were set right."
        )
        self.audits_left_out = self._process_counter(
            "audits_left_out", "Times the books held too many reservations to be compared at once."
        )


class TableMeter:
    """Exports the running totals of one table as counters, and its size as gauges."""

    def __init__(self, telemetry: Telemetry, rank: str) -> None:
        self._telemetry = telemetry
        self._rank = rank
        self._table: BlockTable | None = None
        self._exported: dict[Counter, int] = {}

    def export(
        self,
        table: BlockTable,
        pending_count: int,
        completeness_ratio: float,
        tier: TierTable | None = None,
    ) -> None:
        """Bring the metrics up to date; those of a tier where there is one."""
        telemetry, rank = self._telemetry, self._rank
        is_another = self._table not in (None, table)  # it has applied what was counted before
        self._table = table
        totals = [
            (telemetry.blocks_stored, table.stored_count),
            (telemetry.blocks_removed, table.removed_count),
            (telemetry.blocks_refused, table.refused_count),
            (telemetry.unknown_parents, table.unknown_parents_count),
            (telemetry.unknown_removals, table.unknown_removals_count),
            (telemetry.blocks_confirmed, table.confirmed_count),
            (telemetry.blocks_credited, table.credited_count),
            (telemetry.blocks_trimmed, table.trimmed_count),
        ]
        if tier is not None:
            totals += [
                (telemetry.tier_blocks_refused, tier.refused_count),
                (telemetry.tier_blocks_forgotten, tier.forgotten_count),
            ]
            telemetry.tier_blocks.labels(rank).set(len(tier))
        for counter, total in totals:
            if not is_another:
                counter.labels(rank).inc(total - self._exported.get(counter, 0))
            self._exported[counter] = total
        telemetry.table_blocks.labels(rank).set(len(table))
        telemetry.waiting_blocks.labels(rank).set(table.unplaced_count)
        telemetry.index_blocks.labels(rank).set(table.published_count)
        doubted_count = table.set_aside_count - table.withheld_count
        telemetry.blocks_set_aside.labels(rank).set(doubted_count)
        telemetry.blocks_withheld.labels(rank).set(table.withheld_count)
        telemetry.pending_blocks.labels(rank).set(pending_count)
        telemetry.completeness.labels(rank).set(completeness_ratio)


def configure_logging(level: str) -> None:
    """JSON lines on standard output."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
    )
