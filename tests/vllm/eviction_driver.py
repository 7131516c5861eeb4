"""Run requests in vLLM without the eviction plugin and with it: `python eviction_driver.py < JSON`.

In vLLM's environment, where the plugin is found by its entry point. The engine core runs in this
process, by a clock that only the requests move. The input is `{"model": folder, "engine": limits,
"requests": [...]}`: limits as a Scenario of `step_scenarios` has them, each request `{"id", "at_s",
"prompt", "output_tokens", "category"}`, rising by time; those of one time are added together. The
last line of the output is JSON: what `main` says.
"""

import json
import logging
import os
import sys
import time
from itertools import groupby
from typing import Any

from step_driver import EventLog, make_engine  # it sets the environment
from vllm import SamplingParams, plugins, version
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.engine.llm_engine import LLMEngine

VARIABLE = "TIMESTABLE_VLLM_EVICTION"


class Clock:
    """Seconds, as the requests tell them."""

    now_s = 0.0

    def __call__(self) -> float:
        """This late."""
        return self.now_s


class TimedQueue:
    """A queue of free blocks, with what taking blocks out of it costs."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.taken_count = 0
        self.taken_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """All else is the queue's."""
        return getattr(self._queue, name)

    def popleft_n(self, n: int) -> Any:
        """As the queue's."""
        begun_s = time.perf_counter()
        blocks = self._queue.popleft_n(n)
        self.taken_s += time.perf_counter() - begun_s
        self.taken_count += n
        return blocks


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(record.getMessage())


def load_plugins(lines: Lines) -> None:
    """As every vLLM process does, once more; vLLM's set-up of logging has taken handlers away."""
    log = logging.getLogger("vllm.timestable.eviction")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    plugins.plugins_loaded = False
    plugins.load_general_plugins()


def installed() -> dict[str, Any]:
    """What vLLM finds of ours by its entry points, and which modules that has brought."""
    loggers = plugins.load_plugins_by_group(plugins.STAT_LOGGER_PLUGINS_GROUP)
    ours = {name: module for name, module in sys.modules.items() if name.startswith("workers")}
    return {
        "loggers": {name: one.__module__ for name, one in loggers.items()},
        "places": sorted({str(module.__file__) for module in ours.values()}),
        "has_our_libraries": "jsonargparse" in sys.modules,
    }


def run(engine: LLMEngine, requests: list[dict[str, Any]], clock: Clock) -> dict[str, Any]:
    """All requests; each with its answer, its hit, and the events until it and its group ended."""
    log = EventLog()
    core = engine.engine_core.engine_core.scheduler
    core.kv_event_publisher = log
    pool = core.kv_cache_manager.block_pool
    pool.free_block_queue = queue = TimedQueue(pool.free_block_queue)
    groups = []
    for at_s, group in groupby(requests, key=lambda request: request["at_s"]):
        clock.now_s = at_s
        for request in group:
            told = request["category"]
            params = SamplingParams(
                max_tokens=request["output_tokens"],
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if told is None else {"timestable_category": told},
            )
            engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)
        answers = {}
        while engine.has_unfinished_requests():
            for one in engine.step():
                if one.finished:
                    answers[one.request_id] = [
                        list(one.outputs[0].token_ids),
                        one.num_cached_tokens,
                    ]
        groups.append({"answers": answers, "events": log.take()})
    return {
        "pool": type(pool).__name__,
        "groups": groups,
        "take_us": queue.taken_s / queue.taken_count * 1e6,
    }


def main() -> None:
    """Three engines, one after another: the plugin off, on in a vLLM it does not know, and on.

    Prints a list of what `run` gives; of the second engine only its pool and what was logged,
    of the third also what is `installed`.
    """
    wanted = json.load(sys.stdin)
    clock, lines = Clock(), Lines()
    off = make_engine(wanted["model"], wanted["engine"])
    results = [run(off, wanted["requests"], clock)]

    os.environ[VARIABLE] = "workload_aware"
    true_version, version.__version__ = version.__version__, "0.33.0"
    load_plugins(lines)
    version.__version__ = true_version
    pool = kv_cache_coordinator.BlockPool
    results.append({"pool": pool.__name__, "log": lines.lines[:]})
    assert pool is block_pool.BlockPool

    load_plugins(lines)
    kv_cache_coordinator.BlockPool.clock = clock
    on = make_engine(wanted["model"], wanted["engine"])
    clock.now_s = 0.0
    results.append(run(on, wanted["requests"], clock) | {"log": lines.lines})
    results[-1]["installed"] = installed()
    print(json.dumps(results))  # noqa: T201  # the result


if __name__ == "__main__":
    main()
