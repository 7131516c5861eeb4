"""What of the engine's /metrics concerns routing, and nothing else.

The text has thousands of lines and is read many times a second, so only the wanted families are
looked up in it. Names and labels: vLLM 0.32; `gpu_cache_usage_perc` is the older name.
"""

import re
from dataclasses import dataclass
from typing import Final

from indexer.contract.records import EngineCounters

RUNNING: Final = b"vllm:num_requests_running"
WAITING: Final = b"vllm:num_requests_waiting"
KV_USAGE_NAMES: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
SLEEP_STATE: Final = b"vllm:engine_sleep_state"
CACHE_CONFIG: Final = b"vllm:cache_config_info"

SLEEP_LEVELS: Final = {"weights_offloaded": 1, "discard_all": 2}

_LABEL = re.compile(rb'[{,]\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape of one engine core (data-parallel rank).

    Attributes:
        counters: its load.
        sleep_level: None awake, 0 only paused, from 1 on the KV cache is gone.
    """

    counters: EngineCounters
    sleep_level: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The engine's own block size and its number of device blocks."""

    block_size_tokens: int
    capacity_blocks: int | None


def parse_samples(text: bytes) -> dict[str, EngineSample]:
    """Samples by `engine` label (`0` where there is none); without those that miss a part.

    Raises:
        ValueError: a wanted line has no number.
    """
    running = _gauge(text, RUNNING)
    if not running:
        return {}
    waiting = _gauge(text, WAITING)
    kv_usage = _gauge(text, KV_USAGE_NAMES[0]) or _gauge(text, KV_USAGE_NAMES[1])
    sleep_levels = _sleep_levels(text)
    return {
        engine: EngineSample(
            counters=EngineCounters(
                running_count=int(running[engine]),
                waiting_count=int(waiting[engine]),
                kv_usage_ratio=min(max(kv_usage[engine], 0.0), 1.0),
            ),
            sleep_level=sleep_levels.get(engine),
        )
        for engine in running
        if engine in waiting and engine in kv_usage
    }


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
