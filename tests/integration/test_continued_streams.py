"""A stream that breaks goes on at another instance, through a whole router and real sockets."""

import asyncio
import json
from typing import Any

import pytest
from byte_engine import CHUNKED, Answer, ByteEngine, chunk, plain, saying
from fleets import chain, reserved, store
from prometheus_client import REGISTRY
from router_edge import PROMPT, Edge, completion, edge

pytestmark = pytest.mark.integration

DONE = chunk(b"data: [DONE]\n\n")
LAST = b"0\r\n\r\n"


def event(text: str, token: int, *, name: str, finish: str | None = None) -> bytes:
    """One token, as vLLM tells it when it is asked for ids."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    choice |= {"prompt_token_ids": None, "token_ids": [token]}
    if token == 0:
        choice["prompt_token_ids"] = PROMPT
    value = {"id": name, "created": len(name), "model": "m", "choices": [choice]}
    return chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def usage(prompt_tokens: int, completion_tokens: int, *, name: str) -> bytes:
    """The event before the end."""
    total = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    total["total_tokens"] = prompt_tokens + completion_tokens
    value = {"id": name, "created": len(name), "model": "m", "choices": [], "usage": total}
    return chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


FIRST = (event("one", 0, name="first"), event(" two", 1, name="first"))
REST = (
    *(event(" three", 2, name="second"), event(" four", 3, name="second", finish="length")),
    *(usage(66, 2, name="second"), DONE, LAST),
)
ERROR = chunk(b'data: {"error":{"message":"dead","type":"InternalServerError","code":500}}\n\n')

BREAKS: dict[str, Answer] = {
    "resets": saying(CHUNKED, *FIRST, reset=True),
    "closes in an event": saying(CHUNKED, *FIRST, b'10\r\ndata: {"id":"fir'),
    "ends without [DONE]": saying(CHUNKED, *FIRST, LAST),
    "says that it failed": saying(CHUNKED, *FIRST, ERROR, DONE, LAST),
}


def begun(result: str = "begun") -> float:
    """Continuations so far."""
    name = "timestable_router_continuations_total"
    return REGISTRY.get_sample_value(name, {"result": result}) or 0.0


async def streamed(one: Edge, path: str = "/v1/completions", **changes: Any) -> list[Any]:
    """Values of the events of one stream; the end as it is."""
    async with one.client.post(path, json=completion(max_tokens=4, **changes)) as answer:
        assert answer.status == 200
        data = await answer.read()
    found: list[Any] = []
    for part in data.split(b"\n\n"):
        if part == b"data: [DONE]":
            found.append("[DONE]")
        elif part:
            found.append(json.loads(part.removeprefix(b"data: ")))
    return found


async def prefer_the_first(redis_client: Any, one: Edge) -> None:
    """Every block of the prompt is on slot 0, so it is chosen."""
    await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:4])


@pytest.mark.parametrize("how", BREAKS)
async def test_a_broken_stream_goes_on_elsewhere(redis_client, redis_socket, how: str) -> None:
    """One answer for the client: text, id, end and usage; prompt and tokens for the engine."""
    full = saying(plain(b"503 Service Unavailable", b"{}"))
    engines = (
        ByteEngine("a", BREAKS[how]),
        ByteEngine("b", full),
        ByteEngine("c", saying(CHUNKED, *REST)),
    )
    async with edge(redis_client, redis_socket, *engines, continue_streams=True) as one:
        await prefer_the_first(redis_client, one)
        before = begun()
        events = await streamed(one, stream_options={"include_usage": True})
        assert events.pop() == "[DONE]"
        total = events.pop()["usage"]
        assert (total["prompt_tokens"], total["completion_tokens"]) == (64, 4)
        choices = [value["choices"][0] for value in events]
        assert "".join(choice["text"] for choice in choices) == "one two three four"
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert {value["id"] for value in events} == {"first"}
        shown = {(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices}
        assert shown == {(None, None)}
        asked = json.loads(engines[2].bodies[0])
        assert (asked["prompt"], asked["max_tokens"]) == ([*PROMPT, 0, 1], 2)
        assert begun() == before + 1
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 3


async def test_where_nobody_can_go_on_the_stream_ends_in_an_error(
    redis_client, redis_socket
) -> None:
    """The others refuse, or there are none: what came stays, and the client hears of it."""
    full = saying(plain(b"503 Service Unavailable", b"{}"))
    engines = ByteEngine("a", BREAKS["resets"]), ByteEngine("b", full)
    async with edge(redis_client, redis_socket, *engines, continue_streams=True) as one:
        await prefer_the_first(redis_client, one)
        *events, last = await streamed(one)
        assert [value["choices"][0]["text"] for value in events] == ["one", " two"]
        assert last["error"]["code"] == "upstream-failed"
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 2


STRANGE = {
    "choices": b'data: {"choices":{"a":1}}',
    "a choice": b'data: {"choices":[1]}',
    "ids": b'data: {"choices":[{"text":"x","token_ids":5}]}',
    "usage": b'data: {"choices":[],"usage":{"prompt_tokens":null}}',
    "no space": b'data:{"choices":[{"text":"x","token_ids":[5]}]}',
    "no JSON": b"data: {x",
    "compressed": b"\x1f\x8b",
}


@pytest.mark.parametrize("what", STRANGE)
async def test_what_cannot_be_read_goes_on_as_it_came_and_nobody_continues_it(
    redis_client, redis_socket, what: str
) -> None:
    """Nobody knows where another instance would have to begin, also when what follows is plain."""
    stream = CHUNKED, chunk(STRANGE[what] + b"\n\n"), *FIRST[:1]
    engines = (
        ByteEngine("a", saying(*stream, reset=True)),
        ByteEngine("b", saying(CHUNKED, *REST)),
    )
    async with edge(redis_client, redis_socket, *engines, continue_streams=True) as one:
        await prefer_the_first(redis_client, one)
        async with one.client.post("/v1/completions", json=completion(max_tokens=4)) as answer:
            data = await answer.read()
        assert data.startswith(STRANGE[what] + b"\n\n")
        assert b'"one"' in data
        assert b"upstream-failed" in data
        assert engines[1].bodies == []
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 2


async def test_a_told_length_is_forgotten_where_events_are_read(redis_client, redis_socket) -> None:
    """They are shorter without the ids that the client did not ask for."""
    parts = [part.split(b"\r\n", 1)[1][:-2] for part in (*FIRST, *REST[1:2], DONE)]
    body = b"".join(parts)
    head = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body))
    engine = ByteEngine("a", saying(head + body))
    async with (
        edge(redis_client, redis_socket, engine, continue_streams=True) as one,
        asyncio.timeout(5),
    ):
        *events, last = await streamed(one)
        assert "".join(value["choices"][0]["text"] for value in events) == "one two four"
        assert last == "[DONE]"


@pytest.mark.parametrize(
    ("config", "changes"),
    [({}, {}), ({"continue_streams": True}, {"stop": "x"})],
    ids=["not allowed", "not exact"],
)
async def test_otherwise_bodies_go_as_they_came(
    redis_client, redis_socket, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """And a stream that breaks ends in an error event; nobody else is asked."""
    engines = ByteEngine("a", BREAKS["resets"]), ByteEngine("b", saying(CHUNKED, *REST))
    async with edge(redis_client, redis_socket, *engines, **config) as one:
        await prefer_the_first(redis_client, one)
        *_, last = await streamed(one, **changes)
        assert last["error"]["code"] == "upstream-failed"
        assert (len(engines[0].bodies), len(engines[1].bodies)) == (1, 0)
        assert "return_token_ids" not in json.loads(engines[0].bodies[0])
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 2
