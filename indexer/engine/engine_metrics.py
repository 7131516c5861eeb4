"""What of the engine's /metrics concerns routing, and nothing else.

The text has thousands of lines and is read many times a second, so only the wanted families are
looked up in it. Names and labels: vLLM 0.32; `gpu_cache_usage_perc` is the older name.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

from indexer.contract.records import EngineCounters

RUNNING: Final = b"vllm:num_requests_running"
WAITING: Final = b"vllm:num_requests_waiting"
KV_USAGE_NAMES: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
SLEEP_STATE: Final = b"vllm:engine_sleep_state"
CACHE_CONFIG: Final = b"vllm:cache_config_info"
FIRST_TOKENS: Final = b"vllm:time_to_first_token_seconds_count"
ENDED: Final = b"vllm:request_success_total"  # by reason: failures too

QUERIED: Final = b"vllm:prefix_cache_queries_total"
HITS: Final = b"vllm:prefix_cache_hits_total"
GENERATED: Final = b"vllm:generation_tokens_total"
STARTED: Final = b"process_start_time_seconds"

SLEEP_LEVELS: Final = {"weights_offloaded": 1, "discard_all": 2}

REQUESTS_MAX: Final = 1_000_000
"""Running or waiting in one engine: whoever tells of more counts something else."""

_LABEL = re.compile(rb'[{,]\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTotals:
    """Requests since the engine's start: those that had a first token, and those that ended."""

    first_tokens_count: int
    ended_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape of one engine core (data-parallel rank).

    Attributes:
        counters: its load.
        sleep_level: None awake, 0 only paused, from 1 on the KV cache is gone.
        totals: None when it does not tell them.
        computed_tokens: prompt tokens not found in the KV$ and generated ones since the engine's
            start; None when it does not tell them.
        started_s: wall clock of its process's start; None when it does not tell it.
    """

    counters: EngineCounters
    sleep_level: int | None
    totals: RequestTotals | None = None
    computed_tokens: int | None = None
    started_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The engine's own block size, its number of device blocks, whether it reuses them."""

    block_size_tokens: int
    capacity_blocks: int | None
    reuses_prefixes: bool = True


def parse_samples(text: bytes) -> dict[str, EngineSample]:
    """Samples by `engine` label (`0` where there is none); without those that miss a part.

    Raises:
        ValueError: a wanted line has no number, or none that can be meant.
    """
    running = _gauge(text, RUNNING)
    if not running:
        return {}
    waiting = _gauge(text, WAITING)
    kv_usage = _gauge(text, KV_USAGE_NAMES[0]) or _gauge(text, KV_USAGE_NAMES[1])
    sleep_levels = _sleep_levels(text)
    totals = _request_totals(text)
    computed = _computed_tokens(text)
    started_s = next(iter(_gauge(text, STARTED).values()), None)
    return {
        engine: EngineSample(
            counters=engine_counters(running[engine], waiting[engine], kv_usage[engine]),
            sleep_level=sleep_levels.get(engine),
            totals=totals.get(engine),
            computed_tokens=computed.get(engine),
            started_s=started_s,
        )
        for engine in running
        if engine in waiting and engine in kv_usage
    }


def engine_counters(running: float, waiting: float, kv_usage: float) -> EngineCounters:
    """What an engine tells of its load, once it can be believed.

    Raises:
        ValueError: these are no counts of requests, or the KV usage is no number.
    """
    if not all(0 <= count <= REQUESTS_MAX for count in (running, waiting)):
        raise ValueError(f"counts of requests {running!r}, {waiting!r}")
    if not math.isfinite(kv_usage):
        raise ValueError(f"KV usage {kv_usage!r}")
    return EngineCounters(
        running_count=int(running),
        waiting_count=int(waiting),
        kv_usage_ratio=min(max(float(kv_usage), 0.0), 1.0),
    )


def parse_cache_configs(text: bytes) -> dict[str, CacheConfig]:
    """Cache shapes by `engine` label; without those that name no block size.

    Raises:
        ValueError: a shape is not a number.
    """
    configs = {}
    for line in _lines(text, CACHE_CONFIG):
        labels = _labels(line)
        size, capacity = labels.get("block_size", "None"), labels.get("num_gpu_blocks", "None")
        if size != "None":
            configs[labels.get("engine", "0")] = CacheConfig(
                block_size_tokens=int(size),
                capacity_blocks=None if capacity == "None" else int(capacity),
                reuses_prefixes=labels.get("enable_prefix_caching") != "False",
            )
    return configs


def _sleep_levels(text: bytes) -> dict[str, int]:
    """Levels of the engines that sleep."""
    levels: dict[str, int] = {}
    for line in _lines(text, SLEEP_STATE):
        labels, value = _labels(line), _value(line)
        engine, state = labels.get("engine", "0"), labels.get("sleep_state", "")
        if state == "awake":
            if value == 0.0:
                levels[engine] = max(levels.get(engine, 0), 0)
        elif value and state in SLEEP_LEVELS:
            levels[engine] = max(levels.get(engine, 0), SLEEP_LEVELS[state])
    return levels


def _request_totals(text: bytes) -> dict[str, RequestTotals]:
    """Of the engines that count first tokens; one may show its ends only once there was one."""
    ended = _sums(text, ENDED)
    return {
        engine: RequestTotals(first_tokens_count=count, ended_count=ended.get(engine, 0))
        for engine, count in _sums(text, FIRST_TOKENS).items()
    }


def _sums(text: bytes, name: bytes) -> dict[str, int]:
    """Counts by engine; a histogram's stand apart, each behind its engine's buckets."""
    sums: dict[str, int] = {}
    start = text.find(b"\n" + name)
    while start >= 0:
        end = text.find(b"\n", start + 1)
        end = len(text) if end < 0 else end
        line = text[start + 1 : end]
        value = _value(line)
        if not math.isfinite(value):
            raise ValueError(line)
        engine = _labels(line).get("engine", "0")
        sums[engine] = sums.get(engine, 0) + int(value)
        start = text.find(b"\n" + name, end)
    return sums


def _computed_tokens(text: bytes) -> dict[str, int]:
    """Of the engines that count all of what it takes."""
    queried, hits, generated = (_gauge(text, name) for name in (QUERIED, HITS, GENERATED))
    sums = {
        engine: queried[engine] - hits[engine] + generated[engine]
        for engine in queried
        if engine in hits and engine in generated
    }
    return {engine: int(tokens) for engine, tokens in sums.items() if math.isfinite(tokens)}


def _gauge(text: bytes, name: bytes) -> dict[str, float]:
    return {_labels(line).get("engine", "0"): _value(line) for line in _lines(text, name)}


def _lines(text: bytes, name: bytes) -> list[bytes]:
    """Sample lines of one family, which stand together; without labels only where none has any."""
    lines = []
    for opening in (name + b"{", name + b" "):
        start = 0 if text.startswith(opening) else text.find(b"\n" + opening) + 1
        while text.startswith(opening, start):
            end = text.find(b"\n", start)
            end = len(text) if end < 0 else end
            lines.append(text[start:end])
            start = end + 1
        if lines:
            break
    return lines


def _labels(line: bytes) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in _LABEL.findall(line)}


def _value(line: bytes) -> float:
    return float(line.rpartition(b"}")[2].split()[0 if b"}" in line else 1])
