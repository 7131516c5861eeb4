"""Fleets and snapshots read from a real server."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from builders import make_instance
from fleets import chain, found_fleet, report, store, until

from indexer.contract import fleet_functions, functions
from indexer.contract.link import connected
from router.eligibility import eligible_snapshot
from router.errors import IndexUnavailable, NoEligibleInstance
from router.index.index_client import IndexClient

pytestmark = pytest.mark.integration

PROMPT = list(range(100))
DEADLINE_S = 0.25


@contextlib.asynccontextmanager
async def index_client(socket: Path) -> AsyncIterator[IndexClient]:
    """An index client over a running link."""
    async with connected(f"unix://{socket}") as link:
        yield IndexClient(link, deadline_s=DEADLINE_S)


async def test_a_snapshot_shows_hits_and_counters(redis_client, redis_socket) -> None:
    """Depths of a chain, floored to blocks, beside what engines reported."""
    fleet = await found_fleet(redis_client)
    hashes = chain(fleet, PROMPT)
    await store(redis_client, fleet, 1, hashes[:4])
    await report(redis_client, fleet, 1, running=3, waiting=2)
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        snapshot = eligible_snapshot(await index.look(served, b"".join(hashes)), len(PROMPT))
    assert snapshot.hit_tokens.tolist() == [0, 64]
    assert snapshot.batch_size.tolist() == [0, 5]
    assert not snapshot.degraded


async def test_partitions_are_asked_together(redis_client, redis_socket) -> None:
    """Instances of every partition appear in one snapshot, with their own hits."""
    fleet = await found_fleet(redis_client, names=["a", "b", "c"], partitions=2)
    hashes = chain(fleet, PROMPT)
    await store(redis_client, fleet, 256, hashes[:2])
    await store(redis_client, fleet, 1, hashes)
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        snapshot = eligible_snapshot(await index.look(served, b"".join(hashes)), len(PROMPT))
    assert dict(zip(snapshot.slot.tolist(), snapshot.hit_tokens.tolist(), strict=True)) == {
        0: 0,
        1: 96,
        256: 32,
    }


async def test_an_instance_that_joins_is_seen_by_the_next_request(
    redis_client, redis_socket
) -> None:
    """Membership is part of every read; nobody waits for a refresh."""
    fleet = await found_fleet(redis_client, names=["a"])
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        record = make_instance("late")
        await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, record.encode()))
        snapshot = eligible_snapshot(await index.look(served, b""), 10)
        assert [r.instance_id for r in snapshot.instances] == ["a", "late"]
        await functions.run(redis_client, fleet_functions.close(fleet.fleet_id, 0, 1, -1))
        snapshot = eligible_snapshot(await index.look(served, b""), 10)
        assert [r.instance_id for r in snapshot.instances] == ["late"]


async def test_adapters_and_aliases_are_names_of_their_own(redis_client, redis_socket) -> None:
    """An adapter is served by those that loaded it only; an alias by everybody who has it."""
    fleet = await found_fleet(redis_client, names=["a"])
    both = make_instance("b", models=["m", "alias"], adapters=["lora"], max_model_len_tokens=64)
    await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, both.encode()))
    async with index_client(redis_socket) as index:
        await index.refresh()
        models = index.models()
    assert {name: [r.instance_id for r in m.instances] for name, m in models.items()} == {
        "m": ["a", "b"],
        "alias": ["b"],
        "lora": ["b"],
    }
    assert (models["lora"].adapter, models["alias"].adapter) == ("lora", None)
    assert models["m"].max_model_len_tokens == 64


async def test_an_unknown_model_is_looked_for_once(redis_client, redis_socket) -> None:
    """A name nobody serves is None, and a flood of such requests does not reach Redis."""
    await found_fleet(redis_client)
    async with index_client(redis_socket) as index:
        assert await index.find("nobody") is None
        before = (await redis_client.info("commandstats"))["cmdstat_smembers"]["calls"]
        for _ in range(50):
            assert await index.find("nobody") is None
        after = (await redis_client.info("commandstats"))["cmdstat_smembers"]["calls"]
    assert after - before <= 1


async def test_a_silent_redis_leaves_the_last_fleet(redis_client, redis_socket) -> None:
    """Past the deadline it says so and the last fleet is at hand; then Redis answers again."""
    fleet = await found_fleet(redis_client)
    hashes = chain(fleet, PROMPT)
    await store(redis_client, fleet, 0, hashes)
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        await redis_client.execute_command("CLIENT", "PAUSE", 800, "ALL")
        with pytest.raises(IndexUnavailable):
            await index.look(served, b"".join(hashes))
        snapshot = eligible_snapshot(index.last_sighting(served), len(PROMPT))
        assert (snapshot.degraded, snapshot.hit_tokens.tolist()) == (True, [0, 0])

        async def recovered() -> bool:
            with contextlib.suppress(IndexUnavailable):
                return bool((await index.look(served, b"".join(hashes))).depth_blocks[0])
            return False

        await until(recovered, "an undegraded snapshot")


async def test_an_emptied_redis_leaves_the_last_fleet_until_its_instances_are_back(
    redis_client, redis_socket
) -> None:
    """Engines serve all the while; a fleet founded anew is taken when it is complete."""
    fleet = await found_fleet(redis_client, names=["a", "b"])
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        await redis_client.flushall()
        with pytest.raises(IndexUnavailable):
            await index.look(served, b"")
        await index.refresh()
        await found_fleet(redis_client, names=["a"], epoch=8)
        with pytest.raises(IndexUnavailable):
            await index.look(served, b"")
        await index.refresh()
        served = await index.find("m")
        assert served is not None
        assert [r.instance_id for r in served.instances] == ["a", "b"]
        assert served.fleet.epoch == fleet.epoch

        record = make_instance("b").encode()
        await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, record))
        sighting = await index.look(served, b"")
        assert [r.instance_id for r in eligible_snapshot(sighting, 10).instances] == ["a", "b"]
        assert sighting.fleet.epoch == 8


async def test_a_fleet_founded_anew_in_another_shape_is_read_in_that_shape(
    redis_client, redis_socket
) -> None:
    """A request that was looked up in the old one goes without hits, once."""
    fleet = await found_fleet(redis_client, names=["a", "b"])
    hashes = b"".join(chain(fleet, PROMPT))
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        await redis_client.flushall()
        await found_fleet(redis_client, names=["a", "b"], epoch=8, partitions=2)
        snapshot = eligible_snapshot(await index.look(served, hashes), len(PROMPT))
        assert snapshot.slot.tolist() == [0, 256]
        assert snapshot.hit_tokens.tolist() == [0, 0]


async def test_a_library_that_was_lost_is_loaded_again(redis_client, redis_socket) -> None:
    """A failover to a server without the functions costs one round trip, not the request."""
    await found_fleet(redis_client)
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        await redis_client.execute_command("FUNCTION", "FLUSH")
        snapshot = eligible_snapshot(await index.look(served, b"x" * 80), 100)
        assert not snapshot.degraded


async def test_dead_instances_are_not_a_fleet(redis_client, redis_socket) -> None:
    """When every lease has ended the request is told so."""
    fleet = await found_fleet(redis_client, names=["a"])
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
        await functions.run(redis_client, fleet_functions.close(fleet.fleet_id, 0, 1, -1))
        with pytest.raises(NoEligibleInstance):
            eligible_snapshot(await index.look(served, b""), 10)
        view = await index.fleet_view()
    assert view["fleets"][0]["instances"][0]["flags"] == ["USED", "CLOSING"]


async def test_a_router_without_any_redis_says_so(tmp_path: Path) -> None:
    """No connection at all: no model is known, the view is not fresh, and there is a reason."""
    async with index_client(tmp_path / "nobody.sock") as index:
        assert await index.find("m") is None
        assert (await index.fleet_view())["fresh"] is False
        assert index.not_ready_reason() == "Redis has not answered yet"


async def test_a_fleet_never_read_cannot_be_decided_on(redis_client, redis_socket) -> None:
    """Without Redis and without memory there is nothing to decide from."""
    await found_fleet(redis_client)
    async with index_client(redis_socket) as index:
        served = await index.find("m")
        assert served is not None
    async with index_client(redis_socket.parent / "nobody.sock") as other:
        with pytest.raises(IndexUnavailable):
            await other.look(served, b"")
        with pytest.raises(IndexUnavailable):
            other.last_sighting(served)
