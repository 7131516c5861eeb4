"""Labels of the sidecar's metrics."""

from prometheus_client import CollectorRegistry

from indexer.telemetry import Telemetry


def test_metrics_of_the_process_have_no_label_rank() -> None:
    """Only what one rank does is told by rank."""
    telemetry = Telemetry(CollectorRegistry())
    process_wide = {
        metric
        for name, metric in vars(telemetry).items()
        if not name.startswith("_") and "rank" not in metric._labelnames
    }
    assert process_wide == {
        telemetry.restarts,
        telemetry.redis_failures,
        telemetry.scrape_failures,
        telemetry.steps_malformed,
        telemetry.steps_foreign,
        telemetry.sweeps,
        telemetry.reaped,
        telemetry.balanced_slots,
        telemetry.index_bytes,
        telemetry.index_bytes_per_membership,
        telemetry.redis_evicts,
        telemetry.audits_left_out,
        telemetry.engines,
        telemetry.engine_failures,
        telemetry.list_failures,
    }
