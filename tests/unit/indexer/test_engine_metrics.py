"""Parsing of the engine's metrics text."""

import pytest

from indexer.contract.records import EngineCounters
from indexer.engine.engine_metrics import (
    CacheConfig,
    EngineSample,
    RequestTotals,
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


TOTALS = b"""vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_created{engine="1",finished_reason="stop",model_name="m"} 1.7e+09
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="m"} 7.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="m"} 7.0
vllm:time_to_first_token_seconds_sum{engine="1",model_name="m"} 0.7
"""


def test_totals_by_engine() -> None:
    """Ends of all reasons, and the counts of a histogram, whose lines stand apart."""
    samples = parse_samples(TEXT + TOTALS)
    assert {engine: one.totals for engine, one in samples.items()} == {
        "0": RequestTotals(first_tokens_count=5, ended_count=3),
        "1": RequestTotals(first_tokens_count=7, ended_count=4),
    }
    with pytest.raises(ValueError, match="count"):
        parse_samples(TEXT + TOTALS.replace(b"7.0", b"+Inf"))


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


@pytest.mark.parametrize("told", [b"+Inf", b"-Inf", b"NaN", b"-1.0", b"1e30"])
@pytest.mark.parametrize("name", [b"running", b"waiting", b"kv"])
def test_numbers_that_nobody_can_mean(name: bytes, told: bytes) -> None:
    """They neither end the sidecar nor become a load that routers weigh; a ratio is held."""
    numbers = {b"running": b"1", b"waiting": b"2", b"kv": b"0.5"} | {name: told}
    text = b"".join(
        b'%s{engine="0"} %s\n' % line
        for line in (
            (b"vllm:num_requests_running", numbers[b"running"]),
            (b"vllm:num_requests_waiting", numbers[b"waiting"]),
            (b"vllm:kv_cache_usage_perc", numbers[b"kv"]),
        )
    )
    if name == b"kv" and told in {b"-1.0", b"1e30"}:
        assert parse_samples(text)["0"].counters.kv_usage_ratio in {0.0, 1.0}
        return
    with pytest.raises(ValueError, match=r"counts of requests|KV usage"):
        parse_samples(text)


COMPUTED = b"""vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} NaN
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 0.0
vllm:generation_tokens_total{engine="1",model_name="m"} 0.0
process_start_time_seconds 1.7e+09
"""


def test_what_was_computed_and_since_when() -> None:
    """Prompts less what was found, and answers; unknown where a part is missing or no number."""
    samples = parse_samples(TEXT + b"\n".join(sorted(COMPUTED.splitlines())) + b"\n")
    told = {engine: (one.computed_tokens, one.started_s) for engine, one in samples.items()}
    assert told == {"0": (750, 1.7e9), "1": (None, 1.7e9)}


def test_an_engine_may_reuse_nothing() -> None:
    """Prefix caching can be switched off; older engines do not say."""
    line = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="%s"} 1.0\n'
    for text, expected in ((b"True", True), (b"False", False), (b"None", True)):
        assert parse_cache_configs(line % text)["0"].reuses_prefixes is expected
