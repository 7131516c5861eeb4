"""The sweeper's tools, and the order of writes, on a real server."""

import pytest
from builders import make_fleet_record, make_heartbeat
from contract.embedded_server import EmbeddedServer

from indexer.contract import fleet_functions, index_functions, keys, upkeep
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import BUDGETS_TTL_S

FLEET = make_fleet_record(bucket_bits=4)
HASHES = [BlockHash((n * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")) for n in range(600)]
"""Spread over all buckets, as real ones are."""

PLACE_OF_KEY_BYTES = 16

SLOT = SlotIndex(3)


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """An empty fleet in which slots 0 to 39 may write."""
    server.found(FLEET)
    for slot in range(40):
        server.call(index_functions.open_slot(FLEET, SlotIndex(slot), 1))
    return server


def test_the_lease_has_one_holder(fleet: EmbeddedServer) -> None:
    """Its holder renews it and gives it up; anybody else gets it only then."""
    one, two, ttl_s = b"one", b"two", 5.0
    assert fleet.call(upkeep.lease(FLEET.fleet_id, one, ttl_s)) == 1
    assert fleet.call(upkeep.lease(FLEET.fleet_id, two, ttl_s)) == 0
    assert fleet.call(upkeep.lease(FLEET.fleet_id, two, 0.0)) == 0
    assert fleet.call(upkeep.lease(FLEET.fleet_id, one, ttl_s)) == 1
    assert fleet.redis.pttl(keys.sweeper(FLEET.fleet_id)) > 4000
    assert fleet.call(upkeep.lease(FLEET.fleet_id, one, 0.0)) == 1
    assert fleet.call(upkeep.lease(FLEET.fleet_id, two, ttl_s)) == 1


def test_a_budget_is_for_one_generation(fleet: EmbeddedServer) -> None:
    """Each division replaces the one before; who is not in it, or newer, has no limit."""
    record = b"\x80"
    for slot in (0, 1):
        assert fleet.call(fleet_functions.join(FLEET.fleet_id, record)) == [slot, 1]

    def heard() -> list[int | None]:
        beats = [make_heartbeat(FLEET, SlotIndex(i), 1, counters=None) for i in (0, 1)]
        replies = [fleet_functions.heartbeat_reply(fleet.call(beat)) for beat in beats]
        return [reply and reply.budget_blocks for reply in replies]

    both = {(SlotIndex(0), 1): 70, (SlotIndex(1), 2): 80}
    assert fleet.call(upkeep.budgets(FLEET.fleet_id, both)) == 2
    assert heard() == [70, None]
    assert 0 < fleet.redis.ttl(keys.budgets(FLEET.fleet_id)) <= BUDGETS_TTL_S
    assert fleet.call(upkeep.budgets(FLEET.fleet_id, {(SlotIndex(1), 1): 0})) == 1
    assert heard() == [None, 0]
    assert fleet.call(upkeep.budgets(FLEET.fleet_id, {})) == 0
    assert heard() == [None, None]


def test_measuring_every_bucket_tells_the_whole(fleet: EmbeddedServer) -> None:
    """Blocks, pairs and bytes are those the server counts, whether holders are a list or a map."""
    for slot in range(40):
        mine = HASHES[:10] if slot else HASHES[:256]
        assert fleet.call(index_functions.store(FLEET, SlotIndex(slot), 1, mine)) == 1
    buckets = range(1 << FLEET.bucket_bits)
    keys_ = [keys.bucket(index_functions.anchor(FLEET, 0), b) for b in buckets]
    usages = [fleet.redis.memory_usage(key, samples=0) for key in keys_]
    taken = [usage + PLACE_OF_KEY_BYTES if usage else 0 for usage in usages]

    sample = upkeep.memory_sample(fleet.call(upkeep.measure(FLEET, 0, buckets)))
    assert sample.blocks == sum(fleet.redis.hlen(key) for key in keys_) == 256
    assert sample.memberships == 256 + 39 * 10
    assert sample.bytes == sum(taken)

    few = [3, 7]
    sample = upkeep.memory_sample(fleet.call(upkeep.measure(FLEET, 0, few)))
    assert sample.bytes == taken[3] + taken[7]


def test_a_server_tells_of_its_memory(fleet: EmbeddedServer) -> None:
    """Who it is, what it uses and may use, and what it does when that is all."""
    sample = upkeep.memory_sample(fleet.call(upkeep.measure(FLEET, 0, [])))
    info = fleet.redis.info()
    assert sample.server is not None
    assert sample.server.run_id == info["run_id"]
    assert abs(sample.server.used_bytes - info["used_memory"]) < 1 << 20
    assert (sample.server.limit_bytes, sample.server.policy) == (0, "noeviction")
    assert not sample.server.evicts


def test_who_may_not_ask_a_server_measures_all_the_same(fleet: EmbeddedServer) -> None:
    """A user without INFO gets the index's part only."""
    fleet.call(index_functions.store(FLEET, SLOT, 1, HASHES[:16]))
    fleet.redis.execute_command("ACL SETUSER plain on nopass ~* +@all -info")
    try:
        with fleet.redis.client() as client:
            client.execute_command("AUTH plain none")
            reply = client.execute_command(*upkeep.measure(FLEET, 0, range(16)).command())
    finally:
        fleet.redis.execute_command("ACL DELUSER plain")
    sample = upkeep.memory_sample(reply)
    assert (sample.blocks, sample.server) == (16, None)


def test_a_store_waits_for_the_one_before(fleet: EmbeddedServer) -> None:
    """The second page of a write is not stored where the first was refused."""
    first, second = HASHES[:256], HASHES[256:300]
    late = index_functions.store(FLEET, SLOT, 1, second, after=first[-1])
    assert fleet.call(late) == index_functions.OUT_OF_ORDER
    assert not list(
        fleet.redis.scan_iter(keys.bucket(index_functions.anchor(FLEET, 0), 0)[:-1] + "*")
    )
    assert fleet.call(index_functions.store(FLEET, SLOT, 1, first)) == 1
    assert fleet.call(late) == 1
    other = index_functions.store(FLEET, SlotIndex(4), 1, second, after=first[-1])
    assert fleet.call(other) == index_functions.OUT_OF_ORDER


@pytest.mark.parametrize("holders_count", [1, 40])
def test_a_removal_waits_for_the_one_before(fleet: EmbeddedServer, holders_count: int) -> None:
    """Parents are not removed where the removal of their children was refused."""
    for slot in range(holders_count):
        assert fleet.call(index_functions.store(FLEET, SlotIndex(slot), 1, HASHES[:9])) == 1
    children, parents = HASHES[8:4:-1], HASHES[4::-1]
    late = index_functions.remove(FLEET, SlotIndex(0), 1, parents, after=children[-1])
    assert fleet.call(late) == index_functions.OUT_OF_ORDER
    assert fleet.call(index_functions.remove(FLEET, SlotIndex(0), 1, children)) == 1
    assert fleet.call(late) == 1
