"""Requests that name an answer which one engine holds reach it, whichever router is asked."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from builders import make_fleet_record, make_heartbeat, make_instance
from holding_engine import HoldingEngine
from prometheus_client import REGISTRY
from redis_servers import redis_server
from router_edge import LEASE_S, Edge, edge
from waiting import until, until_equal

from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.identifiers import SlotIndex
from indexer.contract.records import EngineCounters, SlotFlag
from router.composition import composed
from router.config import RouterConfig
from router.door.visitor import digest_of

pytestmark = pytest.mark.integration

BUSY = 50
PROMPT = "What does the harbour look like in winter? " * 40
EXPLAIN = {"x-timestable-explain": "1"}


def counted(name: str, **labels: str) -> float:
    """A counter of this process."""
    return REGISTRY.get_sample_value(f"timestable_router_{name}_total", labels) or 0.0


async def beat(
    client: redis.asyncio.Redis,
    one: Edge,
    slot: int,
    *,
    running: int = 0,
    state: SlotFlag = SlotFlag(0),  # noqa: B008 - immutable
    lease_s: float = LEASE_S,
) -> None:
    """What the sidecar of a slot says of its engine; it says nothing more for long."""
    told = EngineCounters(running_count=running, waiting_count=0, kv_usage_ratio=0.5)
    call = make_heartbeat(one.fleet, SlotIndex(slot), 1, counters=told)
    call = replace(call, args=(*call.args[:3], lease_s, call.args[4], int(state), *call.args[6:]))
    assert await functions.run(client, call)


@dataclass(frozen=True)
class Two:
    """Two routers in front of two engines, of which the first is busy."""

    redis: redis.asyncio.Redis
    one: Edge
    other: aiohttp.ClientSession
    holder: HoldingEngine
    idle: HoldingEngine

    async def made(self, **changes: Any) -> str:
        """Id of a new answer of the holder, made through the first router."""
        await beat(self.redis, self.one, 0)
        await beat(self.redis, self.one, 1, running=BUSY)
        body = {"model": "m", "input": PROMPT} | changes
        async with self.one.client.post("/v1/responses", json=body) as answer:
            text = await answer.text()
        assert answer.headers["x-timestable-instance"] == self.holder.name, text
        found = re.search(r'"id":\s*"([^"]+)"', text)
        assert found is not None
        await beat(self.redis, self.one, 1)
        await beat(self.redis, self.one, 0, running=BUSY)
        return found[1]


@asynccontextmanager
async def two(
    client: redis.asyncio.Redis,
    socket: Path,
    *,
    roles: Sequence[str] = ("both",) * 2,
    **config: Any,
) -> AsyncIterator[Two]:
    """See `Two`; the roles are the holder's and the idle one's."""
    names = ("holder:1/0#x", "idle:1/0#x")
    holder, idle = (HoldingEngine(name, role=role) for name, role in zip(names, roles, strict=True))
    values = {"redis_url": f"unix://{socket}", "port": 0, "index_deadline_s": 2.0} | config
    async with (
        edge(client, socket, holder, idle, **config) as one,
        composed(RouterConfig(**values)) as process,
        aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}") as other,
    ):
        await process.index.refresh()
        yield Two(redis=client, one=one, other=other, holder=holder, idle=idle)


async def known(client: redis.asyncio.Redis, count: int) -> None:
    """Wait until Redis has been told of so many answers."""

    async def told() -> int:
        return sum([await client.hlen(key) for key in await client.keys("ts1:{r:*")])

    await until_equal(count, told)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_goes_to_whoever_holds_the_last(
    redis_client, redis_socket, stream
) -> None:
    """Through the router that saw it and through another, though the score says otherwise."""
    async with two(redis_client, redis_socket) as parts:
        first = await parts.made(stream=stream)
        await known(redis_client, 1)
        named = counted("responses_named", result="held")
        decided = counted("decisions", policy="lmetric", reason="held")
        body = {"model": "m", "input": "And?", "previous_response_id": first, "stream": stream}
        for client in (parts.one.client, parts.other):
            async with client.post("/v1/responses", json=body, headers=EXPLAIN) as answer:
                text = await answer.text()
            assert answer.status == 200
            assert re.search(rf'"previous":\s*"{first}"', text)
            decision = json.loads(answer.headers["x-timestable-decision"])
            assert decision["instance"] == parts.holder.name
            assert [one["instance_id"] for one in decision["candidates"]] == [parts.holder.name]
        assert parts.idle.asked == []
        assert counted("responses_named", result="held") == named + 2
        assert counted("decisions", policy="lmetric", reason="held") == decided + 2
        await parts.one.settled()


async def test_a_holder_is_asked_whatever_it_is_for(redis_client, redis_socket) -> None:
    """A prefill instance has given the one token that was asked for; the next turn decodes."""
    roles = ("prefill", "decode")
    async with two(redis_client, redis_socket, roles=roles) as parts:
        first = await parts.made(max_output_tokens=1)
        await known(redis_client, 1)
        body = {"model": "m", "input": "And?", "previous_response_id": first}
        async with parts.one.client.post("/v1/responses", json=body) as answer:
            text = await answer.text()
        assert (answer.status, json.loads(text).get("previous")) == (200, first), text
        await parts.one.settled()


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("GET", ""),
        ("GET", "?stream=true&starting_after=1"),
        ("POST", "/cancel"),
        ("GET", "/input_items?limit=2"),
        ("DELETE", ""),
    ],
)
async def test_what_an_id_alone_asks_for_reaches_the_holder(
    redis_client, redis_socket, method, ending
) -> None:
    """Read, followed from an event on, cancelled, deleted: as sent, though two fleets are here."""
    async with two(redis_client, redis_socket) as parts:
        other_fleet = make_fleet_record(model_scope="another", fleet_id=keys.fleet_id("another"))
        await functions.run(redis_client, fleet_functions.create(other_fleet))
        strange = make_instance("strange:1/0#x", models=["another"], url="http://127.0.0.1:9")
        await functions.run(
            redis_client, fleet_functions.join(other_fleet.fleet_id, strange.encode())
        )
        await redis_client.sadd(keys.directory(), other_fleet.fleet_id)
        response_id = await parts.made(background=True)
        await known(redis_client, 1)
        path = f"/v1/responses/{response_id}{ending}"
        async with parts.other.request(method, path) as answer:
            text = await answer.text()
        assert (answer.status, parts.holder.asked[-1]) == (200, f"{method} {path}"), text
        assert parts.idle.asked == []
        if "stream" in ending:
            assert re.findall(r'"sequence_number":(\d)', text) == ["2", "3"]
        else:
            assert json.loads(text)["id"] == response_id
        await parts.one.settled()


async def test_an_id_that_nobody_knows_gets_the_engines_own_404(redis_client, redis_socket) -> None:
    """Named by path or body: routed as any other, and the engine's words come back, counted."""
    async with two(redis_client, redis_socket) as parts:
        unknown, missing = (
            counted("responses_named", result="unknown"),
            counted("responses_missing"),
        )
        body = {"model": "m", "input": "And?", "previous_response_id": "resp_0"}
        async with parts.one.client.post("/v1/responses", json=body) as answer:
            posted = await answer.json()
        async with parts.one.client.get("/v1/responses/resp_0") as answer:
            read = await answer.json()
        assert answer.status == 404
        assert posted == read
        assert read["error"]["message"] == "Response with id 'resp_0' not found."
        assert counted("responses_named", result="unknown") == unknown + 2
        assert counted("responses_missing") == missing + 2


async def test_an_engine_that_was_restarted_says_itself_that_it_holds_nothing(
    redis_client, redis_socket
) -> None:
    """In its place is a new instance: asked, because a new sidecar alone would be the same."""
    async with two(redis_client, redis_socket) as parts:
        first, second = await parts.made(), await parts.made()
        await known(redis_client, 2)
        record = make_instance("holder:1/0#y", url=parts.holder.url, model_root="/nonexistent")
        joining = fleet_functions.join(
            parts.one.fleet.fleet_id, record.encode(), former=(SlotIndex(0), 1)
        )
        slot, generation = await functions.run(redis_client, joining)
        opened = index_functions.open_slot(parts.one.fleet, slot, generation)
        await functions.run(redis_client, opened)
        del parts.holder.held[first]
        statuses = {}
        for response_id in (first, second):
            async with parts.other.get(f"/v1/responses/{response_id}") as answer:
                statuses[response_id] = answer.status, answer.headers["x-timestable-instance"]
        assert statuses == {first: (404, "holder:1/0#y"), second: (200, "holder:1/0#y")}
        assert parts.idle.asked == []


async def test_a_holder_that_has_gone_is_anybody(redis_client, redis_socket) -> None:
    """Its lease has ended: another engine says that it holds no such answer."""
    async with two(redis_client, redis_socket) as parts:
        response_id = await parts.made()
        gone = counted("responses_named", result="gone")
        await beat(redis_client, parts.one, 0, lease_s=0)
        body = {"model": "m", "input": "And?", "previous_response_id": response_id}
        async with parts.one.client.post("/v1/responses", json=body) as answer:
            assert (answer.status, len(parts.idle.asked)) == (404, 1)
        async with parts.one.client.get(f"/v1/responses/{response_id}") as answer:
            assert (answer.status, len(parts.idle.asked)) == (404, 2)
        assert counted("responses_named", result="gone") == gone + 2


async def test_a_holder_that_drains_is_read_and_not_given_work(redis_client, redis_socket) -> None:
    """Clients that follow an answer of it see its end; a next turn would be a new request."""
    async with two(redis_client, redis_socket) as parts:
        response_id = await parts.made(background=True)
        await beat(redis_client, parts.one, 0, state=SlotFlag.DRAINING)
        async with parts.one.client.get(f"/v1/responses/{response_id}") as answer:
            assert (answer.status, parts.idle.asked) == (200, [])
        body = {"model": "m", "input": "And?", "previous_response_id": response_id}
        async with parts.one.client.post("/v1/responses", json=body) as answer:
            assert (answer.status, len(parts.idle.asked)) == (404, 1)


async def test_a_holders_trouble_is_the_answer_until_it_is_ejected(
    redis_client, redis_socket
) -> None:
    """Nobody else can answer, so nobody is asked: a 404 would be a lie. Then it is left out."""
    config = {"ejection_failures_min": 1, "ejection_lease_s": 60.0}
    async with two(redis_client, redis_socket, **config) as parts:
        response_id = await parts.made()
        path = f"/v1/responses/{response_id}"
        for status in (503, 500):
            parts.holder.status = status
            async with parts.one.client.get(path) as answer:
                assert (answer.status, parts.idle.asked) == (status, [])
        parts.holder.status = 200
        async with parts.one.client.get(path) as answer:  # the 500 has ejected it
            assert (answer.status, len(parts.idle.asked)) == (404, 1)


async def test_only_what_an_engine_may_hold_is_remembered(redis_client, redis_socket) -> None:
    """Not what says `store: false`, is refused, or is no response."""
    async with two(redis_client, redis_socket) as parts:
        told = counted("responses_learned", result="told")
        await parts.made(store=False)
        await parts.made(store=None)
        for path, body in (
            ("/v1/responses", {"model": "m", "input": "x", "previous_response_id": "resp_0"}),
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": ""}]}),
        ):
            async with parts.one.client.post(path, json=body) as answer:
                assert answer.status == 404
        await parts.made(request_id="the_clients_own")
        await known(redis_client, 1)
        await until_equal(told + 1, lambda: counted("responses_learned", result="told"))
        async with parts.other.get("/v1/responses/the_clients_own") as answer:
            assert (answer.status, parts.idle.asked[2:]) == (200, [])


async def test_nothing_is_remembered_where_that_is_switched_off(redis_client, redis_socket) -> None:
    """`--responses_kept_s 0`: no key in Redis, and ids lead nowhere."""
    async with two(redis_client, redis_socket, responses_kept_s=0) as parts:
        response_id = await parts.made()
        async with parts.one.client.get(f"/v1/responses/{response_id}") as answer:
            assert answer.status == 404
        await parts.one.settled()
        assert await redis_client.keys("ts1:{r:*") == []


async def test_a_conversation_that_only_the_engine_knows_promises_no_hits(
    redis_client, redis_socket
) -> None:
    """The input stands behind it: its text says nothing of where the prompt begins.

    Nor does a sidecar learn that the engine has computed a prompt that begins so.
    """
    async with two(redis_client, redis_socket) as parts:
        told = counted("notices", result="told")
        response_id = await parts.made()
        await until_equal(told + 1, lambda: counted("notices", result="told"))
        body = {"model": "m", "input": PROMPT}
        continued = body | {"previous_response_id": response_id}
        for _ in range(2):
            async with parts.one.client.post(
                "/v1/responses", json=continued, headers=EXPLAIN
            ) as answer:
                decision = json.loads(answer.headers["x-timestable-decision"])
            assert (decision["hit_tokens"], decision["approximate"]) == (0, True)
            assert decision["new_prefill_tokens"] > len(PROMPT) // 8
        async with parts.one.client.post("/v1/responses", json=body) as answer:
            assert answer.status == 200
        await until(lambda: counted("notices", result="told") > told + 1, "the last one is told")
        assert counted("notices", result="told") == told + 2, "nothing of those in between"


async def test_without_redis_each_router_knows_what_it_saw(tmp_path: Path) -> None:
    """Its own answers are found; others' are unknown until Redis is back, which is then told."""
    with redis_server(tmp_path / "redis") as server:
        await until(server.answers, "Redis answers")
        config = {"redis_url": server.url, "index_deadline_s": 0.25}
        async with server.client() as client, two(client, tmp_path, **config) as parts:
            before = await parts.made()
            await known(client, 1)
            server.kill()
            alone = counted("responses_named", result="unavailable")
            body = {"model": "m", "input": "And?", "previous_response_id": before}
            async with parts.one.client.post("/v1/responses", json=body) as answer:
                after = (await answer.json())["id"]
            assert (answer.status, after in parts.holder.held) == (200, True)
            async with parts.one.client.get(f"/v1/responses/{after}") as answer:
                assert answer.status == 200
            async with parts.other.get(f"/v1/responses/{after}") as answer:
                await answer.read()
            assert counted("responses_named", result="unavailable") == alone + 1
            server.start()  # empty
            await until(server.answers, "Redis answers again")
            async with server.client() as again:
                await known(again, 1)


@pytest.mark.parametrize(("models", "status"), [(["m"], 200), (["another"], 403)])
async def test_an_id_is_no_secret_and_a_keys_models_are_still_its_models(
    redis_client, redis_socket, tmp_path, models, status
) -> None:
    """Another key reads it, as of one engine; not one that may ask nothing of the fleet."""
    path = tmp_path / "keys.jsonl"
    entries = [
        {"name": "one", "sha256": digest_of("sk-first-key-of-a-client").hex()},
        {"name": "two", "sha256": digest_of("sk-second-key-of-a-client").hex(), "models": models},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    async with two(redis_client, redis_socket, api_keys_file=str(path)) as parts:
        parts.one.client.headers["Authorization"] = "Bearer sk-first-key-of-a-client"
        response_id = await parts.made()
        second = {"Authorization": "Bearer sk-second-key-of-a-client"}
        async with parts.one.client.get(f"/v1/responses/{response_id}", headers=second) as answer:
            assert (answer.status, parts.idle.asked) == (status, [])
