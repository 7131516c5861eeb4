"""The router's whole path over real sockets: Redis, engine, client."""

import asyncio
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fleets import chain, reserved, store, until
from multidict import CIMultiDict
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    PROMPT,
    USAGE,
    FakeEngine,
    chat,
    completion,
    edge,
    edge_without_redis,
    failing,
    plain,
    stream_all,
)

pytestmark = pytest.mark.integration


async def test_a_stream_passes_through_byte_for_byte(redis_client, redis_socket) -> None:
    """Body in, headers in, chunks out: nothing is changed on the way."""
    engine = FakeEngine("a", stream_all)
    body = b'{ "model":"m",  "prompt": [1,2,3], "stream":true , "x": 1.50}'
    headers = {
        "Authorization": "Bearer k",
        "X-Request-Id": "id-1",
        "Content-Type": "application/json",
    }
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/v1/completions", data=body, headers=headers) as answer:
            received = await answer.read()
        assert (answer.status, received) == (200, b"".join((*CHUNKS, *LAST_CHUNKS)))
        assert answer.headers["x-timestable-instance"] == "a"
        assert answer.headers["x-request-id"] == "id-1"
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert engine.bodies == [body]
        seen = engine.headers[0]
        assert (seen["Authorization"], seen["X-Request-Id"]) == ("Bearer k", "id-1")
        assert seen["Host"] == engine.url.removeprefix("http://")
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_a_plain_answer_keeps_status_length_and_headers(redis_client, redis_socket) -> None:
    """A body of known length stays one, and an engine's error is the client's to read."""
    engine = FakeEngine("a", failing(422))
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/v1/chat/completions", json=chat("hello")) as answer:
            assert (answer.status, await answer.json()) == (422, {"error": {"message": "no"}})
            assert answer.headers["Content-Length"] == "28"
        engine.script = plain
        async with one.client.post("/v1/completions", json=completion(stream=False)) as answer:
            assert (answer.status, (await answer.json())["usage"]) == (200, USAGE)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_the_instance_with_the_prefix_is_chosen_and_says_why(
    redis_client, redis_socket
) -> None:
    """The decision travels in the answer when it is asked for."""
    engines = FakeEngine("a", stream_all), FakeEngine("b", stream_all)
    async with edge(redis_client, redis_socket, *engines) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, PROMPT)[:3])
        headers = {"x-timestable-explain": "1"}
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            await answer.read()
        decision = json.loads(answer.headers["x-timestable-decision"])
        assert answer.headers["x-timestable-instance"] == "b"
        shown = [decision[k] for k in ("policy", "instance", "url", "prompt_tokens", "hit_tokens")]
        assert shown == ["lmetric", "b", engines[1].url, 64, 48]
        assert [c["instance_id"] for c in decision["candidates"]] == ["b", "a"]
        assert [c["score"] for c in decision["candidates"]] == [16.0, 64.0]


async def test_a_request_may_name_its_instances(redis_client, redis_socket) -> None:
    """Where that is allowed, whatever they score; nobody else is tried, and no engine sees it."""
    a, b, gone = FakeEngine("a#1", stream_all), FakeEngine("b#1", stream_all), "x, y#2"
    allowed = {"allow_instance_choice": True}
    async with edge(redis_client, redis_socket, a, b, **allowed) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, PROMPT)[:3])
        for asked, status, chosen in (
            ("a#1", 200, "a#1"),
            (" a ,,", 200, "a#1"),
            ("a#1, b", 200, "b#1"),
            ("a#2", 503, None),
            (gone, 503, None),
            (", ", 400, None),
        ):
            headers = {"x-timestable-instances": asked}
            for path in ("/v1/completions", "/route"):
                async with one.client.post(path, json=completion(), headers=headers) as answer:
                    await answer.read()
                assert answer.status == status
                if path != "/route":
                    assert answer.headers.get("x-timestable-instance") == chosen
        lines = CIMultiDict([("x-timestable-instances", "y#2"), ("x-timestable-instances", "a")])
        async with one.client.post("/v1/completions", json=completion(), headers=lines) as answer:
            await answer.read()
            assert answer.headers.get("x-timestable-instance") == "a#1", "a list of two lines"
        headers = {"x-timestable-instances": "a"}
        body = {"model": "m", "prompt": "x"}
        async with one.client.post("/tokenize", json=body, headers=headers) as answer:
            assert answer.headers["x-timestable-instance"] == "a#1"
    assert len(b.bodies) == 1
    assert all("x-timestable-instances" not in seen for seen in (*a.headers, *b.headers))


async def test_route_decides_and_leaves_no_trace(redis_client, redis_socket) -> None:
    """Nothing is sent and nothing is reserved."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/route", json=completion()) as answer:
            decision = await answer.json()
        assert (answer.status, decision["instance"], decision["new_prefill_tokens"]) == (
            200,
            "a",
            64,
        )
        assert engine.bodies == []
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_a_rank_is_pinned(redis_client, redis_socket) -> None:
    """An instance with a data-parallel rank gets it in a header, whatever the client sent."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine, record={"data_parallel_rank": 3}) as one:
        headers = {"X-data-parallel-rank": "9", "Connection": "keep-alive, x-hop", "x-hop": "1"}
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            await answer.read()
    assert engine.headers[0].getall("X-data-parallel-rank") == ["3"]
    assert "x-hop" not in engine.headers[0]


# -- what bad input gets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "reason", "words"),
    [
        ("chat/completions", b"{", 400, "request-invalid", ["not valid JSON"]),
        ("chat/completions", {"model": "m", "messages": []}, 400, "request-invalid", ["messages"]),
        ("completions", {"model": "m", "prompt": ""}, 400, "request-invalid", ["prompt", "empty"]),
        ("completions", {"prompt": "x"}, 400, "request-invalid", ["model: is required"]),
        ("completions", {"model": "z", "prompt": [1]}, 404, "model-unknown", ["`z`", "m"]),
        ("completions", {"model": "m", "prompt": [1] * 4096}, 400, "prompt-too-long", ["4096"]),
        ("completions", {"model": "m", "prompt": "x" * 200_000}, 413, "body-too-large", ["100000"]),
    ],
)
async def test_bad_input_reaches_no_engine(
    redis_client, redis_socket, *, path, body, status, reason, words
) -> None:
    """An OpenAI-shaped error, the right status, and words that say what to change."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine, body_bytes_max=100_000) as one:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with one.client.post(f"/v1/{path}", data=data) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, answer.headers["x-timestable-reason"]) == (status, reason)
        assert set(error) == {"message", "type", "param", "code"}
        assert [word for word in words if word not in error["message"]] == []
        assert "x-request-id" in answer.headers
        assert engine.bodies == []


async def test_an_endless_upload_is_cut(redis_client, redis_socket) -> None:
    """The limit holds also for a body that does not tell its length."""

    async def upload() -> Any:
        for _ in range(100):
            yield b" " * 10_000

    async with (
        edge(redis_client, redis_socket, FakeEngine("a", plain), body_bytes_max=100_000) as one,
        one.client.post("/v1/completions", data=upload()) as answer,
    ):
        assert answer.status == 413


async def test_an_upload_that_stalls_is_refused(redis_client, redis_socket) -> None:
    """A body has a deadline, and its place among the requests in flight is given back."""
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), body_timeout_s=0.2) as one:
        port = one.process.listeners.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        status = await asyncio.wait_for(reader.readline(), 5)
        assert status == b"HTTP/1.1 408 Request Timeout\r\n"
        await one.settled()
        writer.close()


async def test_a_large_body_passes(redis_client, redis_socket) -> None:
    """Megabytes of prompt are no error, and reach the engine untouched."""
    engine = FakeEngine("a", plain)
    body = json.dumps(completion(stream=False, padding="x" * 3_000_000)).encode()
    async with (
        edge(redis_client, redis_socket, engine) as one,
        one.client.post("/v1/completions", data=io.BytesIO(body)) as answer,
    ):
        assert answer.status == 200
    assert engine.bodies == [body]


async def test_no_instance_is_a_503_with_retry_after(redis_client, redis_socket) -> None:
    """Nobody to ask is not the client's fault."""
    async with edge(redis_client, redis_socket) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            await answer.read()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert answer.headers["x-timestable-reason"] == "no-eligible-instance"
        async with one.client.get("/ready") as answer:
            assert (answer.status, "reason" in await answer.json()) == (503, True)


async def test_a_router_is_ready_once_its_tokenizers_are_loaded_or_cannot_be(
    redis_client, redis_socket
) -> None:
    """Requests that come earlier would be routed without hits."""
    async with edge(redis_client, redis_socket, FakeEngine("a", plain)) as one:
        seen = []

        async def ready() -> bool:
            async with one.client.get("/ready") as answer:
                seen.append((answer.status, (await answer.json()).get("reason")))
            return answer.status == 200

        await until(ready, "ready")
    assert set(seen) == {(503, "loading the tokenizer of m"), (200, None)}


async def test_an_unreachable_redis_is_a_503_that_names_it(tmp_path) -> None:
    """A router that never saw a fleet cannot say that a model does not exist."""
    async with edge_without_redis(tmp_path) as client:
        async with client.post("/v1/completions", json=completion()) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (503, "index-unavailable")


async def test_a_silent_redis_degrades(redis_client, redis_socket) -> None:
    """With a known fleet the request is answered without hits, and the answer says so."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine, index_deadline_s=0.1) as one:
        await redis_client.execute_command("CLIENT", "PAUSE", 1000, "ALL")
        headers = {"x-timestable-explain": "1"}
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            await answer.read()
        assert answer.status == 200
        assert json.loads(answer.headers["x-timestable-decision"])["degraded"] is True


async def test_a_missing_tokenizer_degrades(redis_client, redis_socket) -> None:
    """A text prompt is answered all the same."""
    engine = FakeEngine("a", plain)
    record = {"model_root": "/nonexistent/model"}
    async with (
        edge(redis_client, redis_socket, engine, record=record) as one,
        one.client.post("/v1/chat/completions", json=chat("hello")) as answer,
    ):
        assert answer.status == 200
    assert len(engine.bodies) == 1


# -- what operators ask ---------------------------------------------------------------------------


async def test_operators_see_models_fleet_and_metrics(redis_client, redis_socket) -> None:
    """The lists name what is served."""
    record = {"models": ["m", "alias"], "adapters": ["lora"]}
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, record=record) as one:
        models = await get(one.client, "/v1/models")
        named = {model["id"]: model["parent"] for model in models["data"]}
        assert named == {"m": None, "alias": None, "lora": "m"}
        fleet = (await get(one.client, "/fleet"))["fleets"][0]
        assert [i["instance_id"] for i in fleet["instances"]] == ["a"]
        async with one.client.get("/metrics") as answer:
            assert "timestable_router_in_flight_requests" in await answer.text()


async def get(client: Any, path: str) -> Any:
    """JSON of a path."""
    async with client.get(path) as answer:
        assert answer.status == 200
        return await answer.json()


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/completions", 405, ["POST"]),
        ("POST", "/v3/embeddings", 404, ["/v1/chat/completions", "/v1/completions"]),
    ],
)
async def test_a_wrong_path_or_method_is_told_the_right_ones(
    redis_client, redis_socket, *, method: str, path: str, status: int, words: Sequence[str]
) -> None:
    """OpenAI-shaped, like every other error."""
    async with (
        edge(redis_client, redis_socket) as one,
        one.client.request(method, path) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == status
        assert [word for word in words if word not in error["message"]] == []
