"""Parsing of the engine's metrics text."""

import pytest

from indexer.contract.records import EngineCounters
from indexer.engine.engine_metrics import (
    CacheConfig,
    EngineSample,
    parse_cache_configs,
    parse_samples,
)

TEXT = rb"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} \"c\",engine=\"7\""} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1.7e-05
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="discard_all"} 1.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="weights_offloaded"} 0.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="160"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="None"} 1.0
"""


def sample(running: int, waiting: int, usage: float, sleep: int | None = None) -> EngineSample:
    """A sample by position."""
    counters = EngineCounters(running_count=running, waiting_count=waiting, kv_usage_ratio=usage)
    return EngineSample(counters=counters, sleep_level=sleep)


def test_samples_by_engine() -> None:
    """Every rank has its own numbers; label values may hold anything."""
    assert {"0": sample(3, 1, 0.5), "1": sample(4, 0, 1.7e-05, 2)} == parse_samples(TEXT)


def test_cache_configs_by_engine() -> None:
    """Block size and capacity are labels of an info metric; capacity may be unknown."""
    assert {
        "0": CacheConfig(block_size_tokens=32, capacity_blocks=160),
        "1": CacheConfig(block_size_tokens=32, capacity_blocks=None),
    } == parse_cache_configs(TEXT)


def test_older_name_of_kv_usage() -> None:
    """`gpu_cache_usage_perc` is taken where the newer name is absent."""
    text = TEXT.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
    assert parse_samples(TEXT) == parse_samples(text)


def test_lines_without_labels() -> None:
    """An engine that labels nothing is engine 0."""
    text = (
        b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.25\n"
    )
    assert {"0": sample(2, 1, 0.25)} == parse_samples(text)


def test_text_that_ends_without_a_newline() -> None:
    """The last line counts."""
    assert parse_samples(TEXT) == parse_samples(TEXT.rstrip())


@pytest.mark.parametrize(("name", "level"), [("weights_offloaded", 1), ("discard_all", 2)])
def test_sleep_levels(name: str, level: int) -> None:
    """The state that is 1 names the level."""
    load = b"".join(
        line for line in TEXT.splitlines(keepends=True) if b"engine_sleep_state" not in line
    )
    asleep = f'vllm:engine_sleep_state{{engine="1",model_name="m",sleep_state="{name}"}} 1.0\n'
    assert parse_samples(load + asleep.encode())["1"].sleep_level == level


def test_nothing_of_interest() -> None:
    """A text without the names gives nothing."""
    assert parse_samples(b"# nothing\nup 1\n") == {}
    assert parse_cache_configs(b"") == {}


def test_not_a_number() -> None:
    """A line without a number is an error, not a zero."""
    with pytest.raises(ValueError, match="many"):
        parse_samples(b'vllm:num_requests_running{engine="0"} many\n')
