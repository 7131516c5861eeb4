"""Names of the sidecar's metrics, and its structured log.

Log events are past-tense verbs; every line of a rank carries `rank` and `instance_id`.
"""

import logging
import sys
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from indexer.block_table import BlockTable

LAG_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Telemetry:
    """All metrics of one sidecar process; those of one rank have the label `rank`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def process_counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"timestable_indexer_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return process_counter(name, text, "rank", *labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"timestable_indexer_{name}", text, ("rank",), registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            name = f"timestable_indexer_{name}"
            return Histogram(name, text, ("rank",), buckets=LAG_BUCKETS_S, registry=registry)

        self.batches = counter("batches", "Event batches applied.")
        self.blocks_stored = counter("blocks_stored", "Block stores the engine announced.")
        self.blocks_removed = counter("blocks_removed", "Block removals the engine announced.")
        self.blocks_refused = counter(
            "blocks_refused", "Stores not taken: no tokens, or a full table."
        )
        self.events_unknown = counter("events_unknown", "Events of a type not known here.")
        self.events_malformed = counter("events_malformed", "Events or messages not readable.")
        self.unknown_parents = counter("unknown_parents", "Stores that wait for their parent.")
        self.unknown_removals = counter("unknown_removals", "Removals of blocks not known here.")
        self.gaps = counter("gaps", "Losses of batches that no replay could cover.")
        self.batches_lost = counter("batches_lost", "Batches in those gaps.")
        self.replays = counter("replays", "Replays asked for.", "outcome")
        self.published = counter("published_blocks", "Block changes Redis has taken.", "change")
        self.republishes = counter("republishes", "Whole tables published again after a loss.")
        self.publish_s = histogram("publish_seconds", "One write to the index.")
        self.lag_s = histogram("lag_seconds", "Oldest unpublished engine batch until published.")
        self.table_blocks = gauge("table_blocks", "Engine blocks in the table.")
        self.waiting_blocks = gauge("waiting_blocks", "Blocks whose parent is not known.")
        self.index_blocks = gauge("index_blocks", "Canonical blocks to be published.")
        self.pending_blocks = gauge("pending_blocks", "Block changes not yet written.")
        self.completeness = gauge("completeness_ratio", "1 when no batch is missing.")
        self.replay_available = gauge("replay_available", "1 when lost batches can be replayed.")
        self.lease_held = gauge("lease_held", "1 while the instance's lease is renewed.")

        self.restarts = process_counter("restarts", "New engine processes seen.")
        self.redis_failures = process_counter("redis_failures", "Redis calls that failed.", "call")
        self.scrape_failures = process_counter(
            "scrape_failures", "Times the engine did not answer."
        )
        self.sweeps = process_counter("sweeps", "Dead slots swept and freed.")
        self.reaped = process_counter(
            "reaped_reservations", "Reservations of dead routers taken back."
        )


class TableMeter:
    """Exports the running totals of one table as counters, and its size as gauges."""

    def __init__(self, telemetry: Telemetry, rank: str) -> None:
        self._telemetry = telemetry
        self._rank = rank
        self._exported: dict[Counter, int] = {}

    def export(self, table: BlockTable, pending_count: int, completeness_ratio: float) -> None:
        """Bring the metrics up to date."""
        telemetry, rank = self._telemetry, self._rank
        for counter, total in (
            (telemetry.blocks_stored, table.stored_count),
            (telemetry.blocks_removed, table.removed_count),
            (telemetry.blocks_refused, table.refused_count),
            (telemetry.unknown_parents, table.unknown_parents_count),
            (telemetry.unknown_removals, table.unknown_removals_count),
        ):
            counter.labels(rank).inc(total - self._exported.get(counter, 0))
            self._exported[counter] = total
        telemetry.table_blocks.labels(rank).set(len(table))
        telemetry.waiting_blocks.labels(rank).set(table.unplaced_count)
        telemetry.index_blocks.labels(rank).set(table.published_count)
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
