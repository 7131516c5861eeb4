"""What the step plugin sends is what the sidecar reads; vLLM itself runs it in tests/vllm."""

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import msgpack
import prometheus_client
import pytest
import zmq

from indexer.engine.step_statistics import parse_step

MODULE = "workers.vllm.step_stats_plugin"
WAIT_MS = 10_000


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, with the names of vLLM that it imports."""

    def module(name: str, **names: object) -> None:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        module(name)
    module("vllm.v1.metrics.loggers", AggregateStatLoggerBase=object)
    module("vllm.version", __version__="0.32.0")
    module("msgspec", msgpack=SimpleNamespace(encode=msgpack.packb))
    monkeypatch.setenv("TIMESTABLE_VLLM_STEPS", "tcp://127.0.0.1:*")
    sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)  # no other test shall find it


def made(plugin: Any, api_processes: int = 1) -> Any:
    """Its logger, of one rank."""
    parallel = SimpleNamespace(_api_process_count=api_processes)
    return plugin.StepStatLogger(SimpleNamespace(parallel_config=parallel), [0])


def scheduled(running: int) -> SimpleNamespace:
    """What vLLM's scheduler tells."""
    return SimpleNamespace(
        prefix_cache_stats=SimpleNamespace(queries=100, hits=40),
        num_running_reqs=running,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
    )


ITERATION = SimpleNamespace(
    time_to_first_tokens_iter=[0.1, 0.2], finished_requests=[object()], num_generation_tokens=7
)


def test_the_sidecar_reads_what_the_plugin_sends(plugin: Any) -> None:
    """Loads, counts since the start, the level of sleep, and whose steps they are."""
    logger = made(plugin)
    with zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.RCVTIMEO, 100)
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        heard.connect(logger._socket.getsockopt(zmq.LAST_ENDPOINT).decode())
        for number in range(WAIT_MS // 100):
            logger.record(scheduled(number), ITERATION)
            try:
                told = parse_step(heard.recv(), 3.0)
                break
            except zmq.Again:
                continue  # not subscribed yet
        else:
            pytest.fail("nothing was heard")
        heard.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        logger.record_sleep_state(1, 2)
        asleep = parse_step(heard.recv(), 4.0)
    logger._socket.close()
    steps = told.counters.running_count + 1
    assert (told.counters.waiting_count, told.counters.kv_usage_ratio) == (3, 0.25)
    assert (told.totals.first_tokens_count, told.totals.ended_count) == (2 * steps, steps)
    assert told.computed_tokens == 67 * steps
    assert (told.sleep_level, asleep.sleep_level) == (None, 2)
    told_by_metrics = prometheus_client.generate_latest().decode()
    assert told.started_s is not None
    line = next(
        one for one in told_by_metrics.splitlines() if one.startswith("process_start_time_seconds ")
    )
    assert float(line.split()[1]) == told.started_s


def test_failing_statistics_end_the_messages_alone(
    plugin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception here would end vLLM's engine: it is said once, and then there is silence."""
    logger = made(plugin)
    with caplog.at_level(logging.ERROR, "vllm.timestable.steps"):
        for _ in range(3):
            logger.record(SimpleNamespace(), ITERATION)  # without what is looked for
            logger.record_sleep_state(1, 1)
    (said,) = caplog.records
    assert said.getMessage().startswith("no more steps are told: AttributeError")


def test_a_taken_port_is_said(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second engine with the same endpoint serves, and its log says what to change."""
    first = made(plugin)
    endpoint = first._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
    monkeypatch.setenv("TIMESTABLE_VLLM_STEPS", endpoint)
    second = made(plugin)
    second.record(scheduled(1), ITERATION)
    first._socket.close()
    assert "needs a port of its own" in caplog.text


def test_several_api_servers_are_silent(plugin: Any) -> None:
    """Each knows a part only."""
    made(plugin, api_processes=2).record(scheduled(1), ITERATION)


def test_an_untested_vllm_is_refused(plugin: Any) -> None:
    """When vLLM imports the plugin, which it then reports and does without."""
    vars(sys.modules["vllm.version"])["__version__"] = "0.33.0"
    with pytest.raises(RuntimeError, match=r"0\.33\.0 is not among"):
        importlib.reload(plugin)
