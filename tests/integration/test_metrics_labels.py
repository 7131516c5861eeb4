"""What clients send never becomes a label: series are bounded, whoever asks for what."""

import uuid
from pathlib import Path

import aiohttp
import pytest
import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families
from router_edge import Edge, FakeEngine, completion, edge, failing, stream_all

pytestmark = pytest.mark.integration

STRANGERS = 20


async def series(one: Edge) -> tuple[set[str], str]:
    """Every series of the router by name and labels, and the text they came in."""
    async with one.client.get("/metrics") as answer:
        text = await answer.text()
    names = {
        f"{sample.name}{sorted(sample.labels.items())}"
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("timestable_router_")
    }
    return names, text


async def strangers(client: aiohttp.ClientSession, mark: str, count: int) -> None:
    """Requests in which everything a client chooses is new each time."""
    for number in range(count):
        name = f"{mark}{number}"
        headers = {
            "x-request-id": name,
            "x-session-id": name,
            "x-timestable-policy": name,
            "x-timestable-priority": name,
            "Authorization": f"Bearer {name}",
        }
        for path, body in (
            ("/v1/completions", completion(model=name)),
            ("/v1/completions", completion(user=name, cache_salt=name)),
            (f"/v1/{name}", completion()),
            (f"/{name}", completion()),
        ):
            with_policy = headers if number % 2 else {"x-request-id": name}
            async with client.post(path, json=body, headers=with_policy) as answer:
                await answer.read()
        async with client.request(f"X{number}", f"/fleet?{name}") as answer:
            await answer.read()


async def test_strangers_add_no_series(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Unknown models, paths, methods, policies, keys and ids: series do not grow with them.

    A few come with time or with a lease that ends meanwhile, none with each stranger.
    """
    mark = uuid.uuid4().hex[:12]
    async with edge(redis_client, redis_socket, FakeEngine("a:1/0#x", stream_all)) as one:
        await strangers(one.client, mark, 2)
        before, _ = await series(one)
        await strangers(one.client, mark + "x", STRANGERS)
        after, text = await series(one)
        assert len(after - before) < STRANGERS, after - before
        assert mark not in text


async def test_an_engines_status_is_a_label_of_three_digits(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """What an engine answers is bounded, too."""
    async with edge(redis_client, redis_socket, FakeEngine("a:1/0#x", failing(418))) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert answer.status == 418
        _, text = await series(one)
        assert 'status="418"' in text
