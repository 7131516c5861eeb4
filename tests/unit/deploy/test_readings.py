"""What engines and routers say about themselves is read as they mean it."""

import json
from pathlib import Path

import pytest

from deploy.demo.readings import EngineReading, RouterLogs, parse_reading

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="sim",engine="0"} 3.0
simulated_engine_lag_seconds 0.0
simulated_engine_lag_seconds_max 0.25
simulated_engine_busy_seconds_total 12.5
"""


def canonical_line(request_id: str, **fields: float | None) -> str:
    """Build one of a router's canonical lines."""
    return json.dumps({"event": "request_routed", "request_id": request_id, **fields}) + "\n"


def test_an_engine_reading_is_its_busy_time_and_its_worst_lag() -> None:
    """The worst lag counts, not the one of the moment."""
    expected = EngineReading(busy_s=12.5, lag_max_s=0.25)
    assert expected == parse_reading(METRICS)


def test_a_server_that_is_no_simulated_engine_is_refused() -> None:
    """A missing metric is an error, not a zero."""
    with pytest.raises(KeyError, match="busy_seconds"):
        parse_reading("vllm:num_requests_running 1.0\n")


def test_a_page_that_is_no_metrics_is_refused() -> None:
    """Another server on the engine's port is told from an engine without work."""
    with pytest.raises(ValueError, match="invalid metric name"):
        parse_reading("<html> not metrics </html>\n")


def test_router_logs_are_read_once_and_by_whole_lines(tmp_path: Path) -> None:
    """A line counts when it is complete, in the call that first sees it so, and never again."""
    path = tmp_path / "router.log"
    logs = RouterLogs(paths=[path])
    first = canonical_line("a", routing_s=0.001, first_byte_added_s=0.002)
    second = canonical_line("b", routing_s=0.003, first_byte_added_s=0.004)
    path.write_text("plain words\n" + first + second[:20])
    before = logs.added_s()
    path.write_text("plain words\n" + first + second)
    after = logs.added_s()
    assert (before, after, logs.added_s()) == ({"a": 0.003}, {"b": 0.007}, {})


def test_a_request_that_was_never_sent_on_adds_nothing(tmp_path: Path) -> None:
    """A refused request has no routing time to count."""
    path = tmp_path / "router.log"
    path.write_text(canonical_line("a", routing_s=None, first_byte_added_s=None))
    assert RouterLogs(paths=[path]).added_s() == {}
