"""Keys of clients and operators in front of a whole router, and limits that its replicas share."""

import asyncio
import base64
import contextlib
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fleets import until
from redis_servers import redis_server
from router_edge import FakeEngine, completion, edge, plain, silent
from waiting import until_equal

from indexer.contract import keys
from indexer.contract.link import connected
from router.door.key_limits import KeyLimiter
from router.door.visitor import Caller, KeyLimits, Rate, digest_of
from router.errors import KeyLimited
from router.index.redis_guard import RedisGuard

pytestmark = pytest.mark.integration

KEY, OTHER, ADMIN = "sk-first-key-of-a-client", "sk-second-key-of-a-client", "admin-key-for-tests"
HASH = f"sha256:{digest_of(ADMIN).hex()}"


def bearer(key: str) -> dict[str, str]:
    """A key as OpenAI's clients send it."""
    return {"Authorization": f"Bearer {key}"}


def key_file(folder: Path, **fields: Any) -> str:
    """A file with KEY, named `one` and with these fields, and OTHER, named `two`."""
    path = folder / "keys.jsonl"
    entries = [
        {"name": "one", "sha256": digest_of(KEY).hex(), **fields},
        {"name": "two", "sha256": digest_of(OTHER).hex()},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return str(path)


def rewritten(path: Path, text: str) -> None:
    """Another content for a file."""
    path.write_text(text)


async def asked(client: Any, key: str, path: str = "/v1/completions", **body: Any) -> Any:
    """Status, reason header and error of one plain request."""
    whole = completion(stream=False) | body
    async with client.post(path, json=whole, headers=bearer(key)) as answer:
        said = await answer.json()
        return answer.status, answer.headers.get("x-timestable-reason"), said.get("error", {})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": f"Basic {base64.b64encode(f'x:{KEY}'.encode()).decode()}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"x-api-key": ""},
    ],
)
async def test_without_a_known_key_nothing_is_served(
    redis_client, redis_socket, tmp_path, headers
) -> None:
    """In the words of the API that was asked; the key itself is not in them."""
    async with edge(redis_client, redis_socket, api_keys_file=key_file(tmp_path)) as one:
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            said = await answer.json()
        assert (answer.status, said["error"]["type"]) == (401, "authentication_error")
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert KEY not in json.dumps(said)
        async with one.client.post("/v1/messages", json={}, headers=headers) as answer:
            said = await answer.json()
        assert (answer.status, said["type"]) == (401, "error")
        assert said["error"]["type"] == "authentication_error"
        async with one.client.post("/route", json=completion(), headers=headers) as answer:
            assert answer.status == 401
        for path, status in (("/v1/models", 401), ("/unknown", 401), ("/health", 200)):
            async with one.client.get(path, headers=headers) as answer:
                assert answer.status == status


@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
async def test_a_key_opens_and_stays_here(redis_client, redis_socket, tmp_path, name) -> None:
    """Whichever way it comes, engines do not see it, and see their own in its place."""
    engine = FakeEngine("a", plain)
    options = {"api_keys_file": key_file(tmp_path), "engine_api_key": "engine-key"}
    headers = {name: KEY if name == "x-api-key" else f"Bearer {KEY}", "x-other": "kept"}
    async with edge(redis_client, redis_socket, engine, **options) as one:
        answer = await one.client.post("/v1/completions", json=completion(), headers=headers)
        assert answer.status == 200
    (seen,) = engine.headers
    assert seen.getall("Authorization") == ["Bearer engine-key"]
    assert ("x-api-key" in seen, seen["x-other"]) == (False, "kept")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, None), ({"forward_authorization": True}, f"Bearer {KEY}")],
)
async def test_engines_see_a_key_only_if_told_so(
    redis_client, redis_socket, options, expected
) -> None:
    """Where keys are checked here; without keys, what the client sends is the engine's business."""
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, api_keys=f"{KEY},{OTHER}", **options) as it:
        assert (await asked(it.client, KEY))[0] == 200
    async with edge(redis_client, redis_socket, FakeEngine("b", plain)) as it:
        assert (await asked(it.client, KEY))[0] == 200
    assert engine.headers[0].get("Authorization") == expected


async def test_a_key_is_for_its_models(redis_client, redis_socket, tmp_path) -> None:
    """It sees no others either."""
    options = {"api_keys_file": key_file(tmp_path, models=["another"])}
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), **options) as one:
        status, reason, error = await asked(one.client, KEY)
        assert (status, reason, error["type"]) == (403, "forbidden", "permission_error")
        assert (await asked(one.client, OTHER))[0] == 200
        for key, names in ((KEY, []), (OTHER, ["m"])):
            async with one.client.get("/v1/models", headers=bearer(key)) as answer:
                assert [model["id"] for model in (await answer.json())["data"]] == names


async def test_a_changed_file_counts_without_a_restart(
    redis_client, redis_socket, tmp_path, monkeypatch
) -> None:
    """Requests in flight go on; a file that cannot be used changes nothing."""
    monkeypatch.setattr("router.door.reloading.LOOK_EVERY_S", 0.05)
    path = Path(key_file(tmp_path))
    engine = FakeEngine("a", silent)
    async with edge(redis_client, redis_socket, engine, api_keys_file=str(path)) as one:
        running = asyncio.ensure_future(
            one.client.post("/v1/completions", json=completion(), headers=bearer(KEY))
        )
        await until(lambda: engine.bodies, "the engine has the request")
        rewritten(path, f"- {{name: two, sha256: {digest_of(OTHER).hex()}}}\n")

        async def statuses() -> list[int]:
            found = []
            for key in (KEY, OTHER):
                async with one.client.get("/v1/models", headers=bearer(key)) as answer:
                    found.append(answer.status)
            return found

        await until_equal([401, 200], statuses)
        rewritten(path, "- {name: two, sha256: no hash}\n")
        one.process.reloading.ask()
        await asyncio.sleep(0.2)
        assert await statuses() == [401, 200]
        engine.let_go.set()
        async with await running as answer:
            assert (answer.status, b"[DONE]" in await answer.read()) == (200, True)


async def test_operators_have_a_key_of_their_own(redis_client, redis_socket, tmp_path) -> None:
    """A client's does not do; browsers may send it as a password."""
    options = {"api_keys_file": key_file(tmp_path), "admin_key": HASH}
    password = base64.b64encode(f"me:{ADMIN}".encode()).decode()
    async with edge(redis_client, redis_socket, **options) as one:
        for path in ("/metrics", "/fleet", "/decisions"):
            for headers, status in (
                ({}, 401),
                (bearer(KEY), 401),
                (bearer(ADMIN), 200),
                ({"Authorization": f"Basic {password}"}, 200),
            ):
                async with one.client.get(path, headers=headers) as answer:
                    assert (path, answer.status) == (path, status)
        async with one.client.get("/fleet") as answer:
            assert answer.headers["WWW-Authenticate"].startswith("Basic")
        async with one.client.get("/v1/models", headers=bearer(ADMIN)) as answer:
            assert answer.status == 401


async def test_replicas_share_a_limit_of_requests(redis_client, redis_socket, tmp_path) -> None:
    """One after the other, never more than the burst; the refusal says when to come again."""
    options = {"api_keys_file": key_file(tmp_path, requests_per_minute=4)}
    engine = FakeEngine("a", plain)
    async with (
        edge(redis_client, redis_socket, engine, **options) as one,
        edge(redis_client, redis_socket, **options) as two,
    ):
        body = completion(stream=False)
        async with two.client.post("/v1/completions", json=body, headers=bearer(KEY)) as answer:
            assert answer.headers["x-ratelimit-limit-requests"] == "4"
            assert answer.headers["x-ratelimit-remaining-requests"] == "3"
        answers = [(200, None, {})]
        answers += [await asked(it.client, KEY) for it in (one, two) * 3 + (one,)]
        assert [status for status, _, _ in answers] == [200] * 4 + [429] * 4
        assert answers[-1][1] == "key-limited"
        assert (await asked(two.client, OTHER))[0] == 200
        body = completion(stream=False)
        async with two.client.post("/v1/completions", json=body, headers=bearer(KEY)) as answer:
            assert 13 <= int(answer.headers["Retry-After"]) <= 15
    assert len(engine.bodies) == 5
    assert 0 < await redis_client.pttl(keys.quota("one")) <= 60_000


async def test_to_ask_where_a_request_would_go_is_a_request(
    redis_client, redis_socket, tmp_path
) -> None:
    """It is tokenized and looked up like any other, whatever becomes of it."""
    options = {"api_keys_file": key_file(tmp_path, requests_per_minute=2)}
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), **options) as one:
        statuses = []
        for _ in range(3):
            body = completion(stream=False)
            async with one.client.post("/route", json=body, headers=bearer(KEY)) as answer:
                statuses.append(answer.status)
        assert statuses == [200, 200, 429]


async def test_tokens_count_when_they_are_known(redis_client, redis_socket, tmp_path) -> None:
    """A prompt's at once, an output's afterwards, for both replicas; 64 and 100 of 200 here."""
    options = {"api_keys_file": key_file(tmp_path, tokens_per_minute=200)}

    async def verbose(_: FakeEngine, __: Any) -> Any:
        return web.json_response({"usage": {"completion_tokens": 100}})

    async with (
        edge(redis_client, redis_socket, FakeEngine("a", verbose), **options) as one,
        edge(redis_client, redis_socket, **options) as two,
    ):
        assert (await asked(one.client, KEY))[0] == 200
        await until_equal(
            [], lambda: [a for a in one.process.key_limiter._accounts.values() if a.dirty]
        )
        status, _, error = await asked(two.client, KEY)
        assert (status, "tokens" in error["message"]) == (429, True)
        status, _, error = await asked(two.client, KEY, prompt=list(range(201)))
        assert (status, "shorter" in error["message"]) == (429, True)


async def test_requests_in_flight_are_counted_over_replicas(
    redis_client, redis_socket, tmp_path
) -> None:
    """And are free again when a client leaves."""
    options = {"api_keys_file": key_file(tmp_path, concurrent_requests_max=2)}
    engine = FakeEngine("a", silent)
    async with (
        edge(redis_client, redis_socket, engine, **options) as one,
        edge(redis_client, redis_socket, **options) as two,
    ):
        running = [
            asyncio.ensure_future(
                it.client.post("/v1/completions", json=completion(), headers=bearer(KEY))
            )
            for it in (one, two)
        ]
        await until(lambda: len(engine.bodies) == 2, "both are in flight")
        for it in (one, two):
            assert (await asked(it.client, KEY))[:2] == (429, "key-limited")
        running[1].cancel()
        await until_equal(0, lambda: two.process.admission.requests)
        engine.let_go.set()
        engine.script = plain
        assert (await asked(one.client, KEY))[0] == 200
        await (await running[0]).read()


async def test_what_is_in_flight_is_renewed_while_others_end(
    redis_client, redis_socket, monkeypatch
) -> None:
    """Else a long request would be forgotten at the end of its lease, because others are short."""
    monkeypatch.setattr("router.door.key_limits.QUOTA_RENEW_S", 0.3)
    limits = KeyLimits(concurrent_requests_max=9)
    async with connected(f"unix://{redis_socket}") as link, asyncio.TaskGroup() as tasks:
        await until(lambda: link.server_of("x"), "connected")
        limiter = KeyLimiter(link, guard=RedisGuard(deadline_s=5.0))
        running = tasks.create_task(limiter.run())
        with limiter.visit(Caller(name="long", limits=limits), lambda: 0) as visit:
            await visit.charge(1)
            told = await redis_client.hvals(keys.quota("long"))

            async def renewed() -> bool:
                with limiter.visit(Caller(name="short", limits=limits), lambda: 0):
                    pass
                return await redis_client.hvals(keys.quota("long")) != told

            await until_equal(True, renewed)
        running.cancel()


async def test_without_redis_each_router_allows_its_share(tmp_path) -> None:
    """Of two replicas each half, so that together they allow no more than the burst anew."""
    caller = Caller(name="one", limits=KeyLimits(requests=Rate(per_minute=1, burst=6)))
    admitted = []

    async def ask(limiter: KeyLimiter) -> None:
        with contextlib.suppress(KeyLimited), limiter.visit(caller, lambda: 0) as visit:
            await visit.charge(1)
            admitted.append(limiter)

    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path))
        await until(server.answers, "Redis is there")
        limiters = []
        for _ in range(2):
            link = await stack.enter_async_context(connected(server.url))
            limiters.append(KeyLimiter(link, guard=RedisGuard(deadline_s=0.2)))
            await until(lambda link=link: link.server_of("x"), "connected")
        for limiter in (*limiters, *limiters):  # each has heard of the other
            await ask(limiter)
        assert len(admitted) == 4
        server.kill()
        for limiter in limiters * 10:
            await ask(limiter)
        assert [admitted[4:].count(limiter) for limiter in limiters] == [3, 3]


async def test_on_a_cluster_each_key_has_a_slot_of_its_own(cluster) -> None:
    """One call each, and one round trip tells the ends of all, whichever masters have them."""
    limits = KeyLimits(tokens=Rate(per_minute=1, burst=100), concurrent_requests_max=1)
    names = [f"key-{number}" for number in range(8)]
    async with connected(cluster.url) as link:
        await until(lambda: link.server_of(keys.quota(names[0])), "connected")
        limiter = KeyLimiter(link, guard=RedisGuard(deadline_s=5.0))
        for name in names:
            with limiter.visit(Caller(name=name, limits=limits), lambda: 30) as visit:
                await visit.charge(60)
        assert await limiter._settle(list(limiter._accounts.values())) is None
        for name in names:
            with (
                pytest.raises(KeyLimited, match="tokens"),
                limiter.visit(Caller(name=name, limits=limits), lambda: 0) as visit,
            ):
                await visit.charge(11)
