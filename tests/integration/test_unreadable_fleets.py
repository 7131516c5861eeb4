"""What others than a fleet's owners wrote into Redis costs that fleet at most."""

import io
import json
from contextlib import redirect_stdout

import msgpack
import pytest
import redis.asyncio
from builders import make_instance
from fleets import found_fleet
from router_edge import FakeEngine, completion, edge, stream_all

from indexer.contract import fleet_functions, functions, keys
from indexer.contract.identifiers import FleetId
from indexer.contract.link import connected
from indexer.inspection import show
from router.errors import IndexUnavailable
from router.index.index_client import IndexClient
from router.telemetry import INDEX_ERRORS

pytestmark = pytest.mark.integration

BAD = keys.fleet_id("bad")
FAULTS = ["size", "zero", "partitions", "scope", "hash", "garbage", "wrong_type"]


async def spoil(client: redis.asyncio.Redis, fleet: FleetId, fault: str) -> None:
    """Make a part of what Redis holds of a fleet unreadable."""
    record, counters = keys.fleet(fleet), keys.counters(fleet)
    fields = {
        "size": ("block_size_tokens", b"abc"),
        "zero": ("block_size_tokens", b"0"),
        "partitions": ("partitions", b"1000000000"),
        "scope": ("model_scope", b"\xff\xfe"),
    }
    match fault:
        case "hash":
            await client.delete(record)
            await client.set(record, "x")
        case "garbage":
            await client.set(counters, b"garbage" * 20)
        case "wrong_type":
            await client.delete(counters)
            await client.sadd(counters, "x")
        case _:
            field, value = fields[fault]
            await client.hset(record, field, value)


def counted() -> float:
    """Fleets that could not be read, so far."""
    return float(INDEX_ERRORS.labels(call="fleet_record")._value.get())


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_unreadable_fleet_costs_only_itself(redis_client, redis_socket, fault) -> None:
    """Others are found, it is counted; a request for it learns that the index is unavailable."""
    await found_fleet(redis_client)
    await found_fleet(redis_client, fleet_id=BAD, model_scope="bad")
    await spoil(redis_client, BAD, fault)
    await redis_client.sadd(keys.directory(), b"\xff\xfe")
    before = counted()
    async with connected(f"unix://{redis_socket}") as link:
        index = IndexClient(link, deadline_s=2.0)
        await index.refresh()
        assert set(index.models()) == {"m"}
        assert counted() - before == 2
        with pytest.raises(IndexUnavailable):
            await index.find("bad")
        assert (await index.fleet_view())["fresh"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_inspect_shows_what_it_cannot_read(redis_client, redis_socket, fault) -> None:
    """As unreadable, beside the others; in tables too."""
    await found_fleet(redis_client)
    await found_fleet(redis_client, fleet_id=BAD, model_scope="bad")
    await spoil(redis_client, BAD, fault)
    await redis_client.sadd(keys.directory(), b"\xff\xfe")
    texts = []
    async with connected(f"unix://{redis_socket}") as link:
        for as_json in (True, False):
            with redirect_stdout(io.StringIO()) as out:
                await show(link, as_json=as_json)
            texts.append(out.getvalue())
    fleets = json.loads(texts[0][texts[0].index("{\n") :])["fleets"]
    unreadable = {fleet["fleet_id"] for fleet in fleets if "unreadable" in fleet}
    assert (unreadable, len(fleets)) == ({BAD, "\\xff\\xfe"}, 3)
    assert texts[1].count("unreadable: ") == 2


@pytest.mark.parametrize("fault", ["garbage", "wrong_type"])
async def test_a_fleet_that_becomes_unreadable_is_served_as_last_known(
    redis_client, redis_socket, fault
) -> None:
    """The request is answered, without the index."""
    async with edge(redis_client, redis_socket, FakeEngine("a", stream_all)) as one:
        await spoil(redis_client, one.fleet.fleet_id, fault)
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert answer.status == 200
        await one.process.index.refresh()
        assert set(one.process.index.models()) == {"m"}


@pytest.mark.parametrize("rate", [0, -5.0, float("nan"), float("inf")])
async def test_a_number_that_is_no_rate_is_not_known(redis_client, redis_socket, rate) -> None:
    """It costs its instance nothing, and the others do not count against it."""
    fleet = await found_fleet(redis_client, names=["a"])
    for name, told in (("b", rate), ("c", 1000.0), ("d", 4000.0)):
        rates_told = {"prefill_tokens_per_s": told, "tier_tokens_per_s": told}
        record = make_instance(name, **rates_told).encode()
        await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, record))
    async with connected(f"unix://{redis_socket}") as link:
        served = await IndexClient(link, deadline_s=2.0).find("m")
        assert served is not None
        assert [one.instance_id for one in served.instances] == ["a", "b", "c", "d"]
        rates = [one.prefill_tokens_per_s for one in served.instances]
        assert rates == [None, None, 1000.0, 4000.0]
        assert [one.tier_tokens_per_s for one in served.instances] == rates


@pytest.mark.parametrize(
    "change",
    [
        *({"models": 5}, {"url": 5}, {"role": 5}, {"block_size_tokens": 0}),
        *({"tier_tokens_per_s": "fast"}, {"tier_latency_s": None}, {"tier_shared": 5}),
    ],
)
async def test_an_unreadable_instance_costs_only_itself(redis_client, redis_socket, change) -> None:
    """Whatever is in a field, and whatever the slot is."""
    fleet = await found_fleet(redis_client, names=["a"])
    packed = msgpack.packb(msgpack.unpackb(make_instance("b").encode()) | change)
    await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, packed))
    good = make_instance("c").encode()
    wrong = {b"\xff": good, "-1": good, "99999": good}
    await redis_client.hset(keys.instances(fleet.fleet_id), mapping=wrong)
    async with connected(f"unix://{redis_socket}") as link:
        index = IndexClient(link, deadline_s=2.0)
        served = await index.find("m")
        assert served is not None
        assert [one.instance_id for one in served.instances] == ["a"]
