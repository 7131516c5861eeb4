"""Legs that fail: what is tried again, where, and what is passed on."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from router_edge import (
    CHUNKS,
    PROMPT,
    Edge,
    FakeEngine,
    Script,
    broken_stream,
    completion,
    failing,
    hang_up,
    plain,
    stream_all,
)
from two_legs import (
    STREAM,
    ask,
    decoder,
    error_event,
    first_then,
    fleet,
    hands_over_or_streams,
    legs,
    prefiller,
)

from indexer.contract import fleet_functions, functions
from indexer.contract.identifiers import SlotIndex

pytestmark = pytest.mark.integration


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
