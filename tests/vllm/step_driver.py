"""Drive vLLM step by step: `python step_driver.py < scenarios.json`, in vLLM's environment.

The engine core runs in this process, so that each request arrives between two steps of our choice
and everything is the same in every run. The input is `{"model": folder, "scenarios": [...],
"ahead": [...]}`, scenarios as `tests/vllm/step_scenarios.py` makes them, those under `ahead` for
engines that schedule ahead. The last line of the output is JSON, a list with one item per scenario:
a list of steps, each with the KV events as they were handed to the publisher, and the requests that
got a token (id, tokens so far, finished, cached tokens).
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process, stepped by hand
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}

from vllm import EngineArgs, SamplingParams  # it reads the environment
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine

CONTEXT_TOKENS_MAX = 512
RESERVED_BLOCKS = 1
"""vLLM keeps one block of the pool as the null block; no request ever gets it."""


class EventLog:
    """Stands in for the publisher of KV events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def publish(self, batch: Any) -> None:
        """Note a step's events."""
        for event in batch.events:
            parent = getattr(event, "parent_block_hash", None)
            self.events.append(
                {
                    "type": type(event).__name__,
                    "hashes": [str(one) for one in getattr(event, "block_hashes", ())],
                    "parent": None if parent is None else str(parent),
                    "tokens": list(getattr(event, "token_ids", ())),
                }
            )

    def take(self) -> list[dict[str, Any]]:
        """What was noted since the last call."""
        taken, self.events = self.events, []
        return taken

    def shutdown(self) -> None:
        """Nothing is open."""


def schedule_ahead() -> None:
    """Let engines made from here on schedule a step while the one before is computed.

    That is vLLM's default on GPUs. Its CPU platform turns it off, although the scheduler and the
    core's queue of batches do not depend on the device.
    """
    decide = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        decide(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def make_engine(model: str, scenario: dict[str, Any]) -> LLMEngine:
    """An engine with the scenario's limits."""
    arguments = EngineArgs(
        model=model,
        max_model_len=CONTEXT_TOKENS_MAX,
        block_size=scenario["block_size_tokens"],
        num_gpu_blocks_override=scenario["capacity_blocks"] + RESERVED_BLOCKS,
        max_num_seqs=scenario["max_num_seqs"],
        max_num_batched_tokens=scenario["max_num_batched_tokens"],
        enforce_eager=True,
        dtype="float32",
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    return LLMEngine.from_engine_args(arguments)


def run(engine: LLMEngine, scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """Step until all requests have ended."""
    log = EventLog()
    engine.engine_core.engine_core.scheduler.kv_event_publisher = log
    left = list(scenario["requests"])
    aborts = {one["abort_step"]: one["id"] for one in left if one["abort_step"] is not None}
    steps: list[dict[str, Any]] = []
    while left or engine.has_unfinished_requests():
        while left and left[0]["step"] <= len(steps):
            request = left.pop(0)
            prompt = {"prompt_token_ids": request["prompt"]}
            if request["salt"] is not None:
                prompt["cache_salt"] = request["salt"]
            params = SamplingParams(
                max_tokens=request["output_tokens"],
                temperature=0,
                ignore_eos=True,
                allowed_token_ids=[scenario["answer_id"]],
                detokenize=False,
            )
            engine.add_request(request["id"], prompt, params)
        if len(steps) in aborts:
            engine.abort_request([aborts[len(steps)]])
        outputs = engine.step() if engine.has_unfinished_requests() else []
        tokens = [
            (one.request_id, len(one.outputs[0].token_ids), one.finished, one.num_cached_tokens)
            for one in outputs
        ]
        steps.append({"events": log.take(), "tokens": tokens})
    return steps


def main() -> None:
    """Run all scenarios, each in an engine of its own."""
    wanted = json.load(sys.stdin)
    engines = []  # kept: the first to go would take the process group of all others along
    results = []
    for scenario in wanted["scenarios"]:
        engines.append(make_engine(wanted["model"], scenario))
        results.append(run(engines[-1], scenario))
    schedule_ahead()
    for scenario in wanted["ahead"]:
        engines.append(make_engine(wanted["model"], scenario))
        assert engines[-1].engine_core.engine_core.batch_queue is not None
        results.append(run(engines[-1], scenario))
    print(json.dumps(results))  # noqa: T201  # the result


if __name__ == "__main__":
    main()
