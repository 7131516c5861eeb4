"""A router where prefill and decode are apart: bodies, retries, leaving clients; over real sockets.

Whatever happens, all counters are exactly zero afterwards.
"""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fleets import chain, reserved, store, until
from router_edge import (
    PROMPT,
    FakeEngine,
    completion,
    one_chunk,
    plain,
    stream_all,
)
from two_legs import (
    HELD,
    PREFILLED,
    STREAM,
    ask,
    decoder,
    fleet,
    hands_over,
    legs,
    one_chunk_when_let_go,
    prefiller,
    prefills_for_ever,
)

from router.index.index_client import IndexClient
from router.requests.parting import KEEP_KV

pytestmark = pytest.mark.integration


async def test_each_leg_is_asked_for_its_part(redis_client, redis_socket) -> None:
    """The client gets the decode leg's stream as it is; both legs have the same request id.

    What the shapes do not demand stays as it came, and what is handed over does to the byte.
    """
    p, d = prefiller("p"), decoder("d")
    body = (
        b'{"model": "m", "prompt": %b, "stream": true,  "stream_options": {"include_usage": true},'
        b' "min_tokens": 4, "max_tokens": 32, "temperature": 0.10, "user": "\\u00e9"}'
    ) % json.dumps(PROMPT).encode()
    headers = {"Content-Type": "application/json", "x-request-id": "one", "Accept-Encoding": "br"}
    async with (
        fleet(redis_client, redis_socket, p, d) as one,
        one.client.post("/v1/completions", data=body, headers=headers) as answer,
    ):
        assert (answer.status, await answer.read()) == (200, STREAM)
        assert (answer.headers["x-timestable-instance"], answer.headers[PREFILLED]) == ("d", "p")
    rest = b'"model": "m", "prompt": %b' % json.dumps(PROMPT).encode()
    assert p.bodies == [
        b'{"kv_transfer_params": %b, "max_tokens": 1, "stream": false, ' % KEEP_KV
        + rest
        + b', "temperature": 0.10, "user": "\\u00e9"}'
    ]
    assert d.bodies == [b'{"kv_transfer_params": %b, ' % (HELD % "p").encode() + body[1:]]
    assert [e.headers[0]["x-request-id"] for e in (p, d)] == ["one", "one"]
    assert [e.headers[0].get("accept-encoding") for e in (p, d)] == [None, "br"]


async def test_nobody_asks_who_holds_what_was_handed_over(
    redis_client, redis_socket, monkeypatch
) -> None:
    """One lookup a request, as everywhere else: the second look is at the counters alone."""
    looks, look = list[int](), IndexClient.look

    async def noted(self: IndexClient, served: Any, hashes: bytes, *args: Any) -> Any:
        looks.append(len(hashes) // 8)
        return await look(self, served, hashes, *args)

    monkeypatch.setattr(IndexClient, "look", noted)
    async with fleet(redis_client, redis_socket, prefiller("p"), decoder("d")) as one:
        assert (await ask(one))[:2] == (200, STREAM)
    assert looks == [len(PROMPT) // 16, 0]


async def test_a_plain_answer_is_the_decode_legs(redis_client, redis_socket) -> None:
    """Body and usage as the decoding engine wrote them."""
    p, d = prefiller("p"), decoder("d", plain)
    async with fleet(redis_client, redis_socket, p, d) as one:
        status, received, headers = await ask(one, stream=False)
    assert (status, headers["x-timestable-instance"]) == (200, "d")
    assert json.loads(received)["usage"]["prompt_tokens"] == len(PROMPT)


async def test_counters_show_the_leg_that_is_running(redis_client, redis_socket) -> None:
    """Prefill tokens are queued where they are computed and until they are; never at both."""
    p, d = prefiller("p", prefills_for_ever), decoder("d", one_chunk_when_let_go)
    async with fleet(redis_client, redis_socket, p, d) as one:
        asking = asyncio.ensure_future(ask(one))
        await until(lambda: p.bodies, "the prefill leg is there")
        assert await reserved(redis_client, one.fleet) == [(1, 64), (0, 0)]
        p.let_go.set()
        await until(lambda: d.bodies, "the decode leg is there")
        await until(one.process.ledger.settled, "Redis knows")
        assert await reserved(redis_client, one.fleet) == [(0, 0), (1, 1)]
        d.let_go.set()
        await asking


async def test_whoever_does_both_answers_alone(redis_client, redis_socket) -> None:
    """If the policy chooses it among all who prefill; else it may have the decode leg."""
    p, both = prefiller("p"), FakeEngine("both", stream_all)
    async with fleet(redis_client, redis_socket, p, both) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, PROMPT))
        status, received, headers = await ask(one)
        assert (status, received, headers.get(PREFILLED)) == (200, STREAM, None)
        assert json.loads(both.bodies[0]) == completion()
        other = [*PROMPT[:-1], 7, 8, 9] * 8
        await store(redis_client, one.fleet, 0, chain(one.fleet, other))
        status, received, headers = await ask(one, prompt=other)
        assert (status, received, headers.get(PREFILLED)) == (200, STREAM, "p")
    assert json.loads(both.bodies[1])["kv_transfer_params"]["remote_host"] == "p"


async def test_without_a_prefill_pool_a_decoder_answers_alone(redis_client, redis_socket) -> None:
    """And the other way round: every engine computes whole requests if it has to."""
    for engine in (decoder("d"), prefiller("p", stream_all)):
        async with fleet(redis_client, redis_socket, engine) as one:
            status, received, _ = await ask(one)
        assert (status, received) == (200, STREAM)
        assert b"kv_transfer_params" not in engine.bodies[0]
        await redis_client.flushall()


async def test_a_single_token_comes_with_the_prefill(redis_client, redis_socket) -> None:
    """The instance that computes the prompt answers; nobody takes anything over."""
    p, d = prefiller("p", stream_all), decoder("d")
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one, max_tokens=1))[:2] == (200, STREAM)
    assert json.loads(p.bodies[0]) == completion(max_tokens=1)
    assert not d.bodies


@pytest.mark.parametrize(
    "changes",
    [{"n": 2}, {"prompt": [PROMPT, PROMPT]}, {"kv_transfer_params": None}],
    ids=["two choices", "two prompts", "the client's own transfer"],
)
async def test_what_cannot_be_parted_goes_to_one_instance(
    redis_client, redis_socket, changes: dict[str, Any]
) -> None:
    """To one that decodes."""
    p, d = prefiller("p"), decoder("d")
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one, **changes))[:2] == (200, STREAM)
    assert (len(p.bodies), len(d.bodies)) == (0, 1)
    assert json.loads(d.bodies[0]) == completion(**changes)


@pytest.mark.parametrize("where", ["prefill", "before the first byte", "decode"])
async def test_a_client_that_leaves_ends_its_leg(redis_client, redis_socket, where: str) -> None:
    """The engine that works for it is told at once; the books are empty."""
    p = prefiller("p", prefills_for_ever if where == "prefill" else hands_over)
    d = decoder("d", one_chunk if where == "decode" else one_chunk_when_let_go)
    working = p if where == "prefill" else d
    async with fleet(redis_client, redis_socket, p, d) as one:
        async with aiohttp.ClientSession(one.client._base_url) as leaving:
            asking = asyncio.ensure_future(leaving.post("/v1/completions", json=completion()))
            await until(lambda: working.bodies, "the leg is there")
            if where == "decode":
                answer = await asking
                await answer.content.readany()
                answer.close()
            asking.cancel()
        await until(working.aborted.is_set, "the engine is told")
    assert (len(p.bodies), len(d.bodies)) == (1, 0 if where == "prefill" else 1)


async def test_both_legs_are_told(redis_client, redis_socket) -> None:
    """In the answer that a client asks for, in the list of decisions, and in the metrics."""
    before = legs("prefill", "ok"), legs("decode", "ok")
    async with fleet(redis_client, redis_socket, prefiller("p"), decoder("d")) as one:
        headers = {"x-timestable-explain": "1", "x-request-id": "told"}
        async with one.client.post("/v1/completions", json=completion(), headers=headers) as answer:
            told = json.loads(answer.headers["x-timestable-decision"])
            await answer.read()
        async with one.client.get("/decisions?request_id=told") as listed:
            shown = (await listed.json())["decisions"][0]
    assert (told["policy"], told["instance"]) == ("decode_leg", "d")
    assert (told["prefill"]["policy"], told["prefill"]["instance"]) == ("lmetric", "p")
    names = shown["policy"], shown["prefill_instance_id"], shown["instance_id"]
    assert (names, shown["new_prefill_tokens"]) == (("lmetric", "p", "d"), len(PROMPT))
    attempts = shown["attempts"]
    assert [(a["policy"], a["instance_id"]) for a in attempts] == [
        ("lmetric", "p"),
        ("decode_leg", "d"),
    ]
    assert attempts[0]["prompt_tokens"] == attempts[1]["prompt_tokens"] == len(PROMPT)
    assert (legs("prefill", "ok"), legs("decode", "ok")) == (before[0] + 1, before[1] + 1)
