"""Two simulated engines hand KV$ on, in the shapes of vLLM's NixlConnector."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from simulated_engine import Live, running
from waiting import until, until_equal

pytestmark = pytest.mark.integration

PATH = "/v1/completions"
PROMPT = list(range(1000, 1000 + 320))
BODY = {"prompt": PROMPT, "max_tokens": 8, "seed": 7}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
SPEEDUP = 50.0


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Live, Live]]:
    """An engine that prefills and one that decodes."""
    options = {"kv_connector": "nixl", "speedup": SPEEDUP} | options
    async with running(**options) as first, running(**options) as second:
        yield first, second


async def prefilled(engine: Live, **changes: Any) -> dict[str, Any]:
    """What a prefill leg hands over."""
    leg = BODY | {"max_tokens": 1, "kv_transfer_params": KEEP} | changes
    answer = await engine.post(PATH, **leg)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def test_a_decoder_computes_what_is_left_and_answers_the_same() -> None:
    """One token of the prompt; answer and usage are those of an engine that did it all."""
    async with pair() as (first, second):
        alone = await second.post(PATH, **BODY, cache_salt="of another cache")
        queried = second.engine.totals.busy_s
        params = await prefilled(first)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert [len(group) for group in params["remote_block_ids"]] == [len(PROMPT) // 16]
        answer = await second.post(PATH, **BODY, kv_transfer_params=params)
        assert [c["text"] for c in answer["choices"]] == [c["text"] for c in alone["choices"]]
        tokens = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        assert tokens == {"prompt_tokens": 320, "completion_tokens": 8}
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 319}
        assert second.engine.totals.busy_s - queried < queried  # eight steps without the prefill


async def test_blocks_are_held_until_they_are_taken() -> None:
    """By the first engine; the second one has them afterwards, for others as well."""
    async with pair() as (first, second):
        params = await prefilled(first)
        assert first.engine.pool.used_count == 20
        await second.post(PATH, **BODY, kv_transfer_params=params)
        assert (first.engine.pool.used_count, second.engine.pool.used_count) == (0, 0)
        again = await second.post(PATH, **BODY)
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 304}


async def test_a_transfer_takes_its_time() -> None:
    """Latency and size over bandwidth; what is there already is not sent."""
    options = {"kv_transfer_latency_s": 5.0, "kv_transfer_bytes_per_s": 319 * 98_304 / 10.0}
    async with pair(**options) as (first, second):
        params = await prefilled(first)
        begun_s = time.monotonic()
        await second.post(PATH, **BODY, kv_transfer_params=params)
        assert time.monotonic() - begun_s >= 15.0 / SPEEDUP
        params = await prefilled(first)
        begun_s = time.monotonic()
        await second.post(PATH, **BODY, kv_transfer_params=params)
        assert 5.0 / SPEEDUP <= time.monotonic() - begun_s < 15.0 / SPEEDUP


async def test_what_nobody_takes_is_let_go() -> None:
    """When its lease ends; whoever comes later gets an error, as a stream and as a plain answer."""
    async with pair(kv_lease_duration_s=0.2) as (first, second):
        params = await prefilled(first)
        await until(lambda: not first.engine.pool.used_count, "the lease ends")
        leg = BODY | {"kv_transfer_params": params}
        async with second.http.post(PATH, json=leg) as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["type"] == "InternalServerError"
        first_event, *others = await second.events(PATH, **leg)
        assert '"code":500' in first_event
        assert others == ["[DONE]"]
        assert second.engine.pool.used_count == 0


async def test_what_is_refused_is_let_go() -> None:
    """For whatever reason: its blocks are not held until the lease ends."""
    async with pair(max_model_len_tokens=330) as (first, second):
        for wrong in ({"max_tokens": 100}, {"model": "unknown"}, {"min_tokens": 50}):
            leg = BODY | {"kv_transfer_params": await prefilled(first)} | wrong
            assert first.engine.pool.used_count == 20
            async with second.http.post(PATH, json=leg) as answer:
                assert answer.status in (400, 404)
            assert first.engine.pool.used_count == 0


async def test_what_cannot_be_had_may_be_computed() -> None:
    """By choice of whoever runs the engine."""
    async with pair(kv_load_failure_policy="recompute") as (first, second):
        params = await prefilled(first)
        await first.kill()
        answer = await second.post(PATH, **BODY, kv_transfer_params=params)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_an_engine_that_dies_during_a_transfer_fails_it() -> None:
    """What was announced is not there in the end."""
    async with pair(kv_transfer_latency_s=20.0) as (first, second):
        params = await prefilled(first)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(
                second.http.post(PATH, json=BODY | {"kv_transfer_params": params})
            )
            await until_equal(1, second.runtime.metrics.taking_count)
            await first.kill()
        assert (await asked).status == 500


async def test_wrong_use() -> None:
    """As vLLM: what is no object is an error, an incomplete source is not used.

    Not held is what several choices share, and what no connector keeps.
    """
    async with pair() as (first, _), running() as without:
        async with first.http.post(PATH, json=BODY | {"kv_transfer_params": 7}) as answer:
            assert answer.status == 400
        told = await prefilled(first)
        await first.post(PATH, **BODY, kv_transfer_params=told)  # its own, which lets it go
        incomplete = {**told, "remote_host": None}
        whole = await first.post(PATH, **BODY, kv_transfer_params=incomplete)
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 304}
        assert await prefilled(first, n=2) is None
        assert await prefilled(without) is None
        assert (first.engine.pool.used_count, without.engine.pool.used_count) == (0, 0)


async def test_a_client_that_leaves_during_a_transfer_ends_it() -> None:
    """Nothing stays behind at the decoder; the other's blocks go with their lease."""
    async with pair(kv_transfer_latency_s=1000.0, kv_lease_duration_s=0.5) as (first, second):
        params = await prefilled(first)
        leg = BODY | {"kv_transfer_params": params}
        asking = asyncio.ensure_future(second.http.post(PATH, json=leg))
        await until_equal(1, second.runtime.metrics.taking_count)
        asking.cancel()
        await until_equal(0, second.runtime.metrics.taking_count)
        await until(lambda: not first.engine.pool.used_count, "the lease ends")
        assert (second.engine.waiting_count, second.engine.pool.used_count) == (0, 0)
