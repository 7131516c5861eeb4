"""Classes of requests where prefill and decode are apart: each pool is judged by itself."""

import pytest
from fleets import chain, store
from prometheus_client import REGISTRY
from router_edge import PROMPT, failing, stream_all
from two_legs import STREAM, ask, decoder, drain, first_then, fleet, prefiller

from indexer.contract import functions, request_classes
from indexer.contract.identifiers import SlotIndex

pytestmark = pytest.mark.integration

UNJUDGED = "timestable_router_unjudged_requests_total"


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
