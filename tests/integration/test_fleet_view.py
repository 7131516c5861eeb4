"""`GET /fleet` and `GET /decisions` of a running router: what the live page draws."""

from pathlib import Path

import pytest
import redis.asyncio
from fleets import chain, store
from router_edge import PROMPT, FakeEngine, completion, edge, hang_up, stream_all

pytestmark = pytest.mark.integration


async def test_an_instance_says_all_that_decides_about_it(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Batch size, queue, KV$ use, hits, completeness, failures; and who answers."""
    async with edge(redis_client, redis_socket, FakeEngine("a:1/0#x", stream_all)) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            await answer.read()
        await one.settled()
        async with one.client.get("/fleet") as answer:
            view = await answer.json()
        (instance,) = view["fleets"][0]["instances"]
        assert {
            *("reserved_requests", "foreign_requests", "reserved_prefill_tokens", "running_count"),
            *("waiting_count", "kv_usage_ratio", "completeness_ratio", "predictions", "eligible"),
            *("ejection", "failures_in_a_row", "ineligible_reason"),
        } <= set(instance)
        assert {"router_id", "now_s", "in_flight", "queued", "draining"} <= set(view["router"])


async def test_decisions_tell_a_retry_as_it_happened(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Two attempts under the client's id, each with every candidate, and what became of it."""
    engines = FakeEngine("a:1/0#x", hang_up), FakeEngine("b:2/0#x", stream_all)
    async with edge(redis_client, redis_socket, *engines) as one:
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:3])
        headers = {"x-request-id": "mine"}
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            await answer.read()
        async with one.client.get("/decisions?request_id=mine") as answer:
            (told,) = (await answer.json())["decisions"]
        assert [told[k] for k in ("outcome", "status", "attempts_count", "model", "endpoint")] == [
            *("completed", 200, 2, "m", "/v1/completions"),
        ]
        chosen = [attempt["candidates"][0]["instance_id"] for attempt in told["attempts"]]
        assert chosen == ["a:1/0#x", "b:2/0#x"]
        assert told["attempts"][1]["explanation"] == (
            "b:2/0 was the only instance that could take the request."
        )
        async with one.client.get("/decisions") as answer:
            (listed,) = (await answer.json())["decisions"]
        assert listed["instance_id"] == "b:2/0#x"
        assert "attempts" not in listed
