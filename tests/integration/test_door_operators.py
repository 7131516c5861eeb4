"""What operators change by HTTP, and who waits while a router is full."""

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import quote

import aiohttp
import pytest
from engine_stand_in import EngineStandIn
from fleets import until
from router_edge import FakeEngine, completion, edge, plain, silent
from sidecar_run import Probe
from sidecar_run import running as sidecar
from waiting import until_equal

from indexer.contract.records import SlotFlag
from indexer.draining import Drain
from router.composition import composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration

DRAINED = SlotFlag.USED | SlotFlag.DRAINING
ADMIN = "an-admin-key-of-tests"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


async def test_an_instance_is_drained_and_resumed_through_the_router(
    redis_socket, probe: Probe
) -> None:
    """By its whole id or without the part that a restart changes; the sidecar keeps the wish."""
    drain = Drain()
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0, admin_key=ADMIN)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineStandIn())
        await stack.enter_async_context(sidecar(engine, redis_socket, drain=drain))
        await until_equal({0: SlotFlag.USED}, probe.slots)
        process = await stack.enter_async_context(composed(config))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}/", headers=AS_ADMIN)
        )
        async with client.get("/fleet") as answer:
            (instance,) = (await answer.json())["fleets"][0]["instances"]
        whole = instance["instance_id"]
        for instance_id, call, slots in (
            (whole, "drain", {0: DRAINED}),
            (whole, "drain", {0: DRAINED}),
            (whole.partition("#")[0], "resume", {0: SlotFlag.USED}),
        ):
            path = f"/admin/instances/{quote(instance_id, safe='')}/{call}"
            async with client.post(path) as answer:
                said = await answer.json()
            assert (answer.status, said["instance_id"]) == (200, whole)
            assert said["draining"] is drain.is_draining is (call == "drain")
            assert await probe.slots() == slots
        async with client.post("/admin/instances/nobody/drain") as answer:
            said = await answer.json()
        assert (answer.status, whole in said["error"]["message"]) == (404, True)


async def test_a_sidecar_that_does_not_hear_is_said(
    redis_client, redis_socket, monkeypatch
) -> None:
    """The instance has a slot, and nobody who beats for it."""
    monkeypatch.setattr("router.http.operator_calls.HEARD_WITHIN_S", 0.3)
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), admin_port=0) as one:
        url = f"http://127.0.0.1:{one.process.listeners.admin_port}"
        async with one.client.post(f"{url}/admin/instances/a/drain") as answer:
            said = await answer.json()
        assert (answer.status, "sidecar" in said["error"]["message"]) == (503, True)


@pytest.mark.parametrize("key", [ADMIN, None])
async def test_a_web_page_cannot_drain(redis_client, redis_socket, key: str | None) -> None:
    """A browser adds the key it has been given, and a name that leads here is made in a minute."""
    async with edge(redis_client, redis_socket, admin_key=key, admin_port=0) as one:
        listeners = one.process.listeners
        port = listeners.port if key else listeners.admin_port
        url = f"http://127.0.0.1:{port}/admin/drain"
        for origin in ("http://elsewhere.example", f"http://127.0.0.1:{port}", "null"):
            async with one.client.post(url, headers=AS_ADMIN | {"Origin": origin}) as answer:
                assert answer.status == 403
        assert not one.process.admission.draining
        async with one.client.post(url, headers=AS_ADMIN) as answer:
            assert (answer.status, one.process.admission.draining) == (200, True)


async def test_a_router_is_drained_and_resumed(redis_client, redis_socket) -> None:
    """Balancers see it; who comes all the same is served, once for each connection."""
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, admin_key=ADMIN) as one:

        async def ready() -> str | None:
            async with one.client.get("/ready") as answer:
                return (await answer.json()).get("reason")

        for call, reason, connection in (("drain", "draining", "close"), ("resume", None, None)):
            async with one.client.post(f"/admin/{call}", headers=AS_ADMIN) as answer:
                said = await answer.json()
            assert said == {"draining": call == "drain", "in_flight": 0, "queued": 0}
            async with one.client.post("/v1/completions", json=completion(stream=False)) as answer:
                assert (answer.status, answer.headers.get("Connection")) == (200, connection)
            if reason is not None:
                assert await ready() == reason
        await until_equal(None, ready)


async def test_what_changes_the_router_is_not_for_everybody(redis_client, redis_socket) -> None:
    """Without an admin key it is served on the operators' port alone, like nothing else."""
    async with edge(redis_client, redis_socket, admin_port=0) as one:
        async with one.client.post("/admin/drain") as answer:
            assert answer.status == 403
        async with one.client.get("/fleet") as answer:
            assert answer.status == 200
        url = f"http://127.0.0.1:{one.process.listeners.admin_port}"
        async with one.client.get(f"{url}/admin/state") as answer:
            assert (answer.status, (await answer.json())["draining"]) == (200, False)


async def test_who_waits_is_served_by_priority(redis_client, redis_socket) -> None:
    """The header's goes before the body's; who leaves the line is not missed."""
    engine = FakeEngine("a", silent)
    full = {"in_flight_requests_max": 1, "queue_requests_max": 4}
    async with (
        edge(redis_client, redis_socket, engine, **full) as one,
        asyncio.TaskGroup() as tasks,
    ):
        admission = one.process.admission
        waits: dict[str, asyncio.Task[int]] = {}

        async def ask(name: str, headers: dict[str, str], **body: int) -> int:
            whole = completion(user=name, **body)
            async with one.client.post("/v1/completions", json=whole, headers=headers) as answer:
                await answer.read()
                return answer.status

        for name, header, body in (
            ("in flight", None, 0),
            ("last", None, 5),
            ("first", "-3", 9),
            ("leaves", "-9", 0),
            ("second", "1", -9),
        ):
            headers = {} if header is None else {"x-timestable-priority": header}
            waits[name] = tasks.create_task(ask(name, headers, priority=body))
            if name == "in flight":
                await until(lambda: engine.bodies, "the engine has the request")
            else:
                await until_equal(len(waits) - 1, lambda: len(admission._line))
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert answer.headers["x-timestable-reason"] == "overloaded"
        waits["leaves"].cancel()
        await until_equal(3, lambda: admission.queued)
        engine.let_go.set()
    assert [task.result() for name, task in waits.items() if name != "leaves"] == [200] * 4
    order = [name for body in engine.bodies for name in waits if f'"{name}"'.encode() in body]
    assert order == ["in flight", "first", "second", "last"]
    assert all("x-timestable-priority" not in headers for headers in engine.headers)


async def test_keys_take_turns_in_the_line(redis_client, redis_socket) -> None:
    """Whoever has filled the queue neither holds up another key nor keeps it out."""
    engine = FakeEngine("a", silent)
    full = {"in_flight_requests_max": 1, "queue_requests_max": 3, "api_keys": "much,little"}
    async with (
        edge(redis_client, redis_socket, engine, **full) as one,
        asyncio.TaskGroup() as tasks,
    ):
        waits: dict[str, asyncio.Task[int]] = {}

        async def ask(name: str) -> int:
            headers = {"Authorization": f"Bearer {name.split(maxsplit=1)[0]}"}
            whole = completion(user=name)
            async with one.client.post("/v1/completions", json=whole, headers=headers) as answer:
                await answer.read()
                return answer.status

        for name in ("much 0", "much 1", "much 2", "much 3", "little 1"):
            waits[name] = tasks.create_task(ask(name))
            if name == "much 0":
                await until(lambda: engine.bodies, "the engine has the request")
            else:
                await until_equal(min(3, len(waits) - 1), lambda: len(one.process.admission._line))
        await until(waits["much 3"].done, "the last of the key with most has given way")
        engine.let_go.set()
    assert {name: task.result() for name, task in waits.items()} == {
        **dict.fromkeys(("much 0", "much 1", "much 2", "little 1"), 200),
        "much 3": 429,
    }
    order = [name for body in engine.bodies for name in waits if f'"{name}"'.encode() in body]
    assert order == ["much 0", "much 1", "little 1", "much 2"]


async def test_nobody_waits_for_ever(redis_client, redis_socket) -> None:
    """A 503 that says why and when to come again."""
    engine = FakeEngine("a", silent)
    full = {"in_flight_requests_max": 1, "queue_deadline_s": 0.1}
    async with edge(redis_client, redis_socket, engine, **full) as one:
        first = asyncio.ensure_future(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert answer.headers["x-timestable-reason"] == "queue-timeout"
        engine.let_go.set()
        await (await first).read()
