"""How fast an engine computes a prompt, measured while it has nothing else to do.

What engines count under load depends more on the load than on the device: on the length of
prompts, on what else is in the batch, on how many share a step. So a fleet of different devices is
told apart by one equal task, before requests come.
"""

import secrets
import time
from array import array
from typing import Final

import structlog

from indexer.engine.engine_api import EngineApi, EngineInfo
from indexer.errors import EngineUnreachable, EngineUnsuitable

PROBE_TOKENS: Final = 4096
WARM_UP_TOKENS: Final = 64
MEASUREMENTS: Final = 2
"""Of which the faster one counts; the first may meet a kernel that is compiled for it."""

ROOM_TOKENS: Final = 8
"""Left of the model's limit for the answer."""

TOKEN_IDS: Final = 200, 1000
"""Ordinary ones of every vocabulary; drawn, so that nothing of a prompt is in the KV$."""


async def measured_prefill(api: EngineApi, engine: EngineInfo) -> float | None:
    """Prompt tokens a second; None where it is busy, or takes no such prompt of token ids."""
    log = structlog.get_logger()
    limit = engine.max_model_len_tokens or PROBE_TOKENS + ROOM_TOKENS
    count = min(PROBE_TOKENS, limit - ROOM_TOKENS)
    if count < WARM_UP_TOKENS:
        log.warning("prefill_not_measured", reason=f"its prompts have at most {count} tokens")
        return None
    try:
        loads = [sample.counters for sample in (await api.samples()).values()]
        if any(load.running_count + load.waiting_count for load in loads):
            log.warning("prefill_not_measured", reason="the engine has requests")
            return None
        await _seconds(api, engine, WARM_UP_TOKENS)
        seconds = [await _seconds(api, engine, count) for _ in range(MEASUREMENTS)]
    except (EngineUnreachable, EngineUnsuitable) as error:
        log.warning("prefill_not_measured", reason=str(error))
        return None
    tokens_per_s = count / min(seconds)
    log.info("prefill_measured", tokens_per_s=round(tokens_per_s), prompt_tokens=count)
    return tokens_per_s


async def _seconds(api: EngineApi, engine: EngineInfo, count: int) -> float:
    low, high = TOKEN_IDS
    drawn = array("I", secrets.token_bytes(4 * count))
    prompt = [low + number % (high - low) for number in drawn]
    begun_s = time.perf_counter()
    await api.complete({"model": engine.models[0], "prompt": prompt, "max_tokens": 1})
    return time.perf_counter() - begun_s
