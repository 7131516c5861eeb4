"""Endpoints beside chats and completions, and what the operator lets be changed on the way."""

import asyncio
import json

import pytest
from aiohttp import web
from builders import make_fleet_record, make_instance
from fleets import chain, reserved, store
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    PROMPT,
    FakeEngine,
    broken_stream,
    completion,
    edge,
    plain,
    silent,
    stream_all,
)
from waiting import until

from indexer.contract import fleet_functions, functions, keys

pytestmark = pytest.mark.integration

MESSAGES = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "m", "input": "hi"}),
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/embeddings", {"model": "m", "input": [1, 2]}),
        ("/pooling", {"model": "m", "input": "x"}),
        ("/classify", {"input": "x"}),
        ("/score", {"model": "m", "text_1": "a", "text_2": "b"}),
        ("/v1/score", {"model": "m", "text_1": "a", "text_2": "b"}),
        ("/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
        ("/v2/embed", {"model": "m", "texts": ["a"], "input_type": "query"}),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}),
        ("/cohere/v2/chat", MESSAGES | {"documents": ["d"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}}),
        ("/v1/anything/else", {"x": 1}),
    ],
)
async def test_every_endpoint_is_routed(redis_client, redis_socket, *, path, body) -> None:
    """The body arrives as it was sent, at the same path, and nothing is left reserved.

    Where the request names no model, the only fleet is meant.
    """
    engine = FakeEngine("a", plain)
    raw = json.dumps(body, indent=1).encode()
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post(path, data=raw) as answer:
            assert answer.status == 200
            assert answer.headers["x-timestable-instance"] == "a"
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]
    assert engine.bodies == [raw]


@pytest.mark.parametrize(
    ("path", "requests"), [("/tokenize", 0), ("/v1/messages/count_tokens", 0), ("/v1/messages", 1)]
)
async def test_without_a_prefill_nothing_is_reserved(
    redis_client, redis_socket, *, path: str, requests: int
) -> None:
    """While an engine counts tokens, nobody's score is worse for it; a prompt is seen by all."""
    engine = FakeEngine("a", silent)
    async with edge(redis_client, redis_socket, engine) as one, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(one.client.post(path, json=MESSAGES | {"stream": True}))
        await until(lambda: engine.bodies, "the request at the engine")
        assert [seen for seen, _ in await reserved(redis_client, one.fleet)] == [requests]
        engine.let_go.set()
        async with await asking as answer:
            await answer.read()
        assert answer.status == 200


async def test_a_request_without_a_model_needs_the_only_fleet(redis_client, redis_socket) -> None:
    """Of several the router cannot know which is meant, and says so."""
    other = make_fleet_record(fleet_id=keys.fleet_id("z"), model_scope="z")
    async with edge(redis_client, redis_socket, FakeEngine("a", plain)) as one:
        await functions.run(redis_client, fleet_functions.create(other))
        record = make_instance("b", url="http://127.0.0.1:9", models=["z"])
        await functions.run(redis_client, fleet_functions.join(other.fleet_id, record.encode()))
        await redis_client.sadd(keys.directory(), other.fleet_id)
        await one.process.index.refresh()
        async with one.client.post("/tokenize", json={"prompt": "x"}) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "model")
        assert "m, z" in error["message"]


async def test_models_one_by_one_and_the_version(redis_client, redis_socket) -> None:
    """Names may hold slashes; the version is the engines'."""
    record = {"models": ["m", "org/m"], "engine_version": "0.32.0"}
    config = {"model_aliases": {"gpt-x": "org/m", "lost": "nowhere"}}
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, record=record, **config) as one:
        seen = {}
        for path in ("/v1/models/org/m", "/v1/models/gpt-x", "/v1/models/lost", "/version"):
            async with one.client.get(path) as answer:
                seen[path] = answer.status, await answer.json()
        async with one.client.get("/v1/models") as answer:
            listed = [model["id"] for model in (await answer.json())["data"]]
    assert listed == ["gpt-x", "m", "org/m"]
    assert seen["/v1/models/org/m"][1]["id"] == "org/m"
    assert seen["/v1/models/gpt-x"][1]["id"] == "gpt-x"
    assert seen["/v1/models/lost"][0] == 404
    assert seen["/version"] == (200, {"version": "0.32.0", "engines": {"0.32.0": 1}})


async def test_an_alias_reaches_the_engine_as_the_name_it_serves(
    redis_client, redis_socket
) -> None:
    """Every other byte stays; the decision is made for the served model."""
    engine = FakeEngine("a", plain)
    config = {"model_aliases": {"gpt-x": "m"}}
    async with (
        edge(redis_client, redis_socket, engine, **config) as one,
        one.client.post("/v1/completions", data=b'{"prompt" : [1],"model":"gpt-x" }') as answer,
    ):
        assert answer.status == 200
    assert engine.bodies == [b'{"prompt" : [1],"model":"m" }']


USAGE = b'{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":0}}'
USAGE_EVENT = b'data: {"choices":[],"usage":' + USAGE + b"}\n\n"


async def with_usage(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A stream whose usage comes in an event of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in (*CHUNKS, USAGE_EVENT, LAST_CHUNKS[1]):
        await response.write(chunk)
    await response.write_eof()
    return response


@pytest.mark.parametrize("asks", [True, False])
async def test_usage_is_asked_for_and_kept_from_who_did_not_ask(
    redis_client, redis_socket, *, asks: bool
) -> None:
    """The stream is the one the client asked for, and the prediction is compared all the same."""
    engine = FakeEngine("a", with_usage)
    asked = {"stream_options": {"include_usage": True}} if asks else {}
    async with edge(redis_client, redis_socket, engine, inject_usage=True) as one:
        async with one.client.post("/v1/completions", json=completion(**asked)) as answer:
            received = await answer.read()
        await one.settled()
        async with one.client.get("/fleet") as answer:
            view = (await answer.json())["fleets"][0]
    assert view["predictions"]["compared"] == 1
    assert json.loads(engine.bodies[0])["stream_options"] == {"include_usage": True}
    assert (b'"usage"' in received) is asks
    assert received.endswith(b"data: [DONE]\n\n")
    assert received.startswith(b"".join(CHUNKS))


async def test_anthropics_clients_read_errors_in_their_words(redis_client, redis_socket) -> None:
    """Before the answer as its body, in the middle of it as an event by that name."""
    engine = FakeEngine("a", broken_stream)
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/v1/messages", json=MESSAGES | {"model": "z"}) as answer:
            body = await answer.json()
        assert (answer.status, set(body)) == (404, {"type", "error"})
        assert body["error"]["type"] == "not_found_error"
        stream = MESSAGES | {"stream": True}
        async with one.client.post("/v1/messages", json=stream) as answer:
            received = await answer.read()
        assert received.startswith(CHUNKS[0])
        name, data = received.removeprefix(CHUNKS[0]).strip().split(b"\n")
        assert name == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["error"]["type"] == "api_error"


async def test_token_ids_of_generate_find_their_blocks(redis_client, redis_socket) -> None:
    """They are looked up as those of a completion."""
    engines = FakeEngine("a", stream_all), FakeEngine("b", stream_all)
    body = {"model": "m", "token_ids": PROMPT, "sampling_params": {}, "stream": True}
    headers = {"x-timestable-explain": "1"}
    async with edge(redis_client, redis_socket, *engines) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, PROMPT)[:3])
        path = "/inference/v1/generate"
        async with one.client.post(path, json=body, headers=headers) as answer:
            await answer.read()
    decision = json.loads(answer.headers["x-timestable-decision"])
    assert (decision["instance"], decision["hit_tokens"]) == ("b", 48)
