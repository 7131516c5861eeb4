"""A router where prefill and decode are apart: bodies, retries, leaving clients; over real sockets.

Whatever happens, all counters are exactly zero afterwards.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from aiohttp import web
from fleets import chain, reserved, store, until
from prometheus_client import REGISTRY
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    PROMPT,
    Edge,
    FakeEngine,
    Script,
    broken_stream,
    completion,
    edge,
    failing,
    hang_up,
    one_chunk,
    plain,
    stream_all,
)

from indexer.contract import fleet_functions, functions, request_classes
from indexer.contract.identifiers import SlotIndex
from indexer.contract.records import FleetRecord, IndexCounters, SlotFlag
from router.index.index_client import IndexClient
from router.requests.parting import KEEP_KV

pytestmark = pytest.mark.integration

UNJUDGED = "timestable_router_unjudged_requests_total"
PREFILLED = "x-timestable-prefill-instance"
STREAM = b"".join((*CHUNKS, *LAST_CHUNKS))
HELD = '{"do_remote_prefill": true, "remote_block_ids": [1,  2], "lease": 1e2, "remote_host": "%s"}'
"""With spaces and a number that no parser writes again as it was."""


async def hands_over(engine: FakeEngine, _: web.Request) -> web.StreamResponse:
    """A whole prefill leg."""
    usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}}
    fields = f'{{"choices": [], "usage": {json.dumps(usage)}, "kv_transfer_params": '
    text = fields + HELD % engine.name + "}"
    return web.Response(text=text, content_type="application/json")


async def hands_over_or_streams(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A prefill leg, or a whole request."""
    is_leg = b"kv_transfer_params" in engine.bodies[-1]
    return await (hands_over if is_leg else stream_all)(engine, request)


async def prefills_for_ever(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """No answer until let go."""
    await engine.let_go.wait()
    return await hands_over(engine, request)


async def error_event(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """As vLLM says in a stream that a transfer has failed: its status has been sent before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
    await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    await response.write(LAST_CHUNKS[-1])
    return response


async def one_chunk_when_let_go(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Nothing at first."""
    await engine.let_go.wait()
    return await one_chunk(engine, request)


def first_then(first: Script, then: Script) -> Script:
    """Another script from the second request on."""

    async def script(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        chosen = first if len(engine.bodies) == 1 else then
        return await chosen(engine, request)

    return script


def prefiller(name: str, script: Script = hands_over) -> FakeEngine:
    """An instance of the prefill pool."""
    return FakeEngine(name, script, role="prefill")


def decoder(name: str, script: Script = stream_all) -> FakeEngine:
    """An instance of the decode pool."""
    return FakeEngine(name, script, role="decode")


@asynccontextmanager
async def fleet(
    redis_client: Any, redis_socket: Any, *engines: FakeEngine, **config: Any
) -> AsyncIterator[Edge]:
    """A router in front of them, whose counters are all zero at the end."""
    async with edge(redis_client, redis_socket, *engines, **config) as one:
        yield one
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * len(engines)


async def drain(client: redis.asyncio.Redis, of: FleetRecord, slot: SlotIndex) -> None:
    """The instance's sidecar says that it drains."""
    beat = fleet_functions.heartbeat(
        of,
        slot,
        1,
        state=SlotFlag.DRAINING,
        index=IndexCounters(blocks=0, completeness_ratio=0.0),
        counters=None,
    )
    assert await functions.run(client, beat)


async def ask(one: Edge, **changes: Any) -> tuple[int, bytes, Any]:
    """Status, body and headers of a completion."""
    async with one.client.post("/v1/completions", json=completion(**changes)) as answer:
        return answer.status, await answer.read(), answer.headers


def legs(leg: str, result: str) -> float:
    """How many there were, of all tests."""
    labels = {"leg": leg, "result": result}
    return REGISTRY.get_sample_value("timestable_router_legs_total", labels) or 0.0


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


@pytest.mark.parametrize("script", [hang_up, failing(503), failing(502)])
async def test_a_failed_prefill_leg_is_tried_elsewhere(
    redis_client, redis_socket, script: Script
) -> None:
    """As for whole requests; the decode leg gets what the good one holds."""
    bad, good, d = prefiller("bad", script), prefiller("good"), decoder("d")
    async with fleet(redis_client, redis_socket, bad, good, d) as one:
        answers = [await ask(one, prompt=[n, *PROMPT[1:]]) for n in range(8)]
    assert {answer[:2] for answer in answers} == {(200, STREAM)}
    assert bad.bodies, "the bad one was asked"
    assert all(b'"remote_host": "good"' in body for body in d.bodies)


async def test_what_a_prefill_leg_refuses_is_the_answer(redis_client, redis_socket) -> None:
    """A 400 is about the request: nobody decodes it."""
    p, d = prefiller("p", failing(400)), decoder("d")
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one))[0] == 400
    assert (len(p.bodies), len(d.bodies)) == (1, 0)


async def test_a_prefill_that_hands_nothing_over_is_computed_again(
    redis_client, redis_socket
) -> None:
    """An engine without a connector."""
    p, d = prefiller("p", plain), decoder("d")
    before = legs("prefill", "empty")
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one))[:2] == (200, STREAM)
    assert json.loads(d.bodies[0]) == completion()
    assert legs("prefill", "empty") == before + 1


class Gone(FakeEngine):
    """An engine that was killed a moment ago: its port refuses."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeEngine"]:
        """Listen no more."""
        async with super().serving():
            pass
        yield self


async def until_failed(one: Edge) -> None:
    """Ask until the decode leg of a request has failed once."""
    before = legs("decode", "failed")
    for n in range(20):
        assert (await ask(one, prompt=[n, *PROMPT[1:]]))[:2] == (200, STREAM)
        if legs("decode", "failed") > before:
            return
    pytest.fail("the bad one was never chosen")


async def test_what_was_not_taken_is_handed_to_another_one(redis_client, redis_socket) -> None:
    """A decoder that cannot be reached: nothing is computed again."""
    p, bad, good = prefiller("p"), Gone("bad", hang_up, role="decode"), decoder("good")
    async with fleet(redis_client, redis_socket, p, bad, good) as one:
        await until_failed(one)
    assert len(p.bodies) == len(good.bodies)


async def test_what_may_be_gone_is_not_handed_over_again(redis_client, redis_socket) -> None:
    """The time for which it is certainly held is over: the request begins anew."""
    p, bad, good = prefiller("p"), Gone("bad", hang_up, role="decode"), decoder("good")
    async with fleet(redis_client, redis_socket, p, bad, good, handover_kept_s=0.0) as one:
        await until_failed(one)
    assert len(p.bodies) == len(good.bodies) + 1


@pytest.mark.parametrize("role", ["decode", "both"])
async def test_where_nobody_decodes_a_prefiller_answers_alone(
    redis_client, redis_socket, role: str
) -> None:
    """The only one that does has failed, in whichever leg; every engine can compute all of it."""
    p, bad = prefiller("p", hands_over_or_streams), FakeEngine("bad", hang_up, role=role)
    async with fleet(redis_client, redis_socket, p, bad) as one:
        for n in range(4):
            assert (await ask(one, prompt=[n, *PROMPT[1:]]))[:2] == (200, STREAM)
    assert bad.bodies


async def test_decoders_that_go_meanwhile_leave_the_rest_to_a_prefiller(
    redis_client, redis_socket
) -> None:
    """They have gone while the prompt was computed."""
    p, d = prefiller("p"), decoder("d")

    async def ends_the_pool(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        if len(engine.bodies) == 1:
            gone = fleet_functions.close(one.fleet.fleet_id, SlotIndex(1), 1, -1)
            await functions.run(redis_client, gone)
        return await hands_over_or_streams(engine, request)

    p.script = ends_the_pool
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one))[:2] == (200, STREAM)
    assert (len(p.bodies), d.bodies) == (2, [])


@pytest.mark.parametrize("script", [hang_up, failing(502), failing(503)])
async def test_what_may_have_been_taken_is_prefilled_anew(
    redis_client, redis_socket, script: Script
) -> None:
    """A decoder killed before its first byte has taken it, perhaps; one that refuses lets it go."""
    p, bad, good = prefiller("p"), decoder("bad", script), decoder("good")
    async with fleet(redis_client, redis_socket, p, bad, good) as one:
        await until_failed(one)
    assert bad.bodies
    assert len(p.bodies) == len(good.bodies) + 1


@pytest.mark.parametrize("script", [failing(500), error_event], ids=["500", "event"])
async def test_a_transfer_that_fails_begins_anew_with_another_prefiller(
    redis_client, redis_socket, script: Script
) -> None:
    """The prefiller is missing, so the decoder is asked again, and nobody is ejected for it."""
    p, q = prefiller("p"), prefiller("q")
    d = decoder("d", first_then(script, stream_all))
    async with fleet(redis_client, redis_socket, p, q, d, ejection_failures_min=1) as one:
        assert (await ask(one))[:2] == (200, STREAM)
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert [instance["ejection"] for instance in instances] == [None] * 3
    first, second, *_ = (json.loads(body)["kv_transfer_params"]["remote_host"] for body in d.bodies)
    assert {first, second} == {"p", "q"}


async def test_a_request_that_begins_anew_is_of_its_class_once(redis_client, redis_socket) -> None:
    """However many legs and tries it takes."""
    p, d = prefiller("p"), decoder("d", first_then(failing(500), stream_all))
    async with fleet(redis_client, redis_socket, p, d, detect_hot_prefixes=True) as one:
        assert (await ask(one))[:2] == (200, STREAM)
        call = request_classes.classes(one.fleet.fleet_id)
        counted, _ = request_classes.class_states(await functions.run(redis_client, call))
    assert (len(d.bodies), round(counted)) == (2, 1)


async def test_a_class_is_counted_in_the_pool_that_is_asked(redis_client, redis_socket) -> None:
    """What is hot where prompts are prefilled is not for whom answers whole requests, nor hides it.

    Fourteen parted requests of one class among fifteen, beside twenty whole ones of none: of all
    requests that is less than a half, which one holder of two would bear.
    """
    engines = [prefiller("p"), prefiller("q"), decoder("d"), decoder("e")]
    options = {"policy": "max_hit", "detect_hot_prefixes": True}
    async with fleet(redis_client, redis_socket, *engines, **options) as one:
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT))
        for number in range(20):
            assert (await ask(one, n=2, prompt=[900 + number] * 64))[0] == 200
        assert (await ask(one, prompt=[800] * 64))[0] == 200
        for _ in range(14):
            assert (await ask(one))[0] == 200
        async with one.client.get("/decisions") as answer:
            last = (await answer.json())["decisions"][0]
        call = request_classes.classes(one.fleet.fleet_id)
        _, states = request_classes.class_states(await functions.run(redis_client, call))
    assert last["hot_class"]["standing"] == "taken_out"
    assert [(state.taken_out, state.holders) for state in states] == [(True, 1)]
    assert len(engines[1].bodies) > 1


async def test_nobody_judges_a_pool_that_is_not_asked(redis_client, redis_socket) -> None:
    """All who prefill drain: their requests go whole to others, and say nothing of their class."""
    engines = [prefiller("p"), prefiller("q"), decoder("d"), decoder("e")]
    options = {"policy": "max_hit", "detect_hot_prefixes": True}
    unjudged = {"reason": "pool"}
    async with fleet(redis_client, redis_socket, *engines, **options) as one:
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT))
        assert (await ask(one, prompt=[800] * 64))[0] == 200
        for _ in range(14):
            assert (await ask(one))[0] == 200
        for slot in (0, 1):
            await drain(redis_client, one.fleet, SlotIndex(slot))
        before = REGISTRY.get_sample_value(UNJUDGED, unjudged) or 0.0
        asked = [len(engine.bodies) for engine in engines[:2]]
        for _ in range(2):
            assert (await ask(one))[0] == 200
        assert REGISTRY.get_sample_value(UNJUDGED, unjudged) == before + 2
        async with one.client.get("/decisions") as answer:
            last = (await answer.json())["decisions"][0]
        call = request_classes.classes(one.fleet.fleet_id)
        _, states = request_classes.class_states(await functions.run(redis_client, call))
    assert last["hot_class"] is None
    assert [len(engine.bodies) for engine in engines[:2]] == asked
    assert [(state.taken_out, state.holders) for state in states] == [(True, 1)]


async def test_the_only_prefiller_is_asked_again(redis_client, redis_socket) -> None:
    """It may be well, and only what it held is gone."""
    p, d = prefiller("p"), decoder("d", first_then(failing(500), stream_all))
    async with fleet(redis_client, redis_socket, p, d) as one:
        assert (await ask(one))[:2] == (200, STREAM)
    assert (len(p.bodies), len(d.bodies)) == (2, 2)


async def test_a_last_500_is_passed_on(redis_client, redis_socket) -> None:
    """Tries are bounded over both legs together; nobody is ejected for what another one held."""
    p, d = prefiller("p"), decoder("d", failing(500))
    bounds = {"retries_max": 1, "ejection_failures_min": 1}
    async with fleet(redis_client, redis_socket, p, d, **bounds) as one:
        assert (await ask(one))[0] == 500
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert [instance["ejection"] for instance in instances] == [None] * 2
    assert (len(p.bodies), len(d.bodies)) == (2, 2)


async def test_a_decoder_that_loses_every_transfer_is_left(redis_client, redis_socket) -> None:
    """Once the prefiller may be to blame; of two in a row at one decoder, the decoder is."""
    p, q, bad, good = prefiller("p"), prefiller("q"), decoder("bad", failing(500)), decoder("good")
    async with fleet(redis_client, redis_socket, p, q, bad, good, retries_max=2) as one:
        for _ in range(8):
            assert (await ask(one))[:2] == (200, STREAM)
    assert bad.bodies


async def test_nothing_is_tried_again_behind_a_byte(redis_client, redis_socket) -> None:
    """The client keeps what it has and is told."""
    p, d, e = prefiller("p"), decoder("d", broken_stream), decoder("e", broken_stream)
    async with fleet(redis_client, redis_socket, p, d, e) as one:
        status, received, _ = await ask(one)
    assert (status, received.startswith(CHUNKS[0])) == (200, True)
    assert json.loads(received.split(b"data: ")[-1])["error"]["code"] == "upstream-failed"
    assert (len(p.bodies), len(d.bodies) + len(e.bodies)) == (1, 1)


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
