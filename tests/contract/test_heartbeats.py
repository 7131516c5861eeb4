"""What a heartbeat tells Redis, and what it brings back."""

import pytest
from builders import make_fleet_record, make_heartbeat, make_instance
from contract.embedded_server import EmbeddedServer

from indexer.contract import fleet_functions, keys
from indexer.contract.limits import INSTANCE_LEASE_TTL_S, NOTICES_PER_SLOT_MAX
from indexer.contract.records import (
    EngineCounters,
    HeartbeatReply,
    IndexCounters,
    Notice,
    TooLate,
)

FLEET = make_fleet_record(bucket_bits=4, epoch=0xFEDCBA9876543210)
RECORD = make_instance().encode()


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """A newly founded, empty fleet."""
    server.found(FLEET)
    return server


def test_a_notice_reaches_the_sidecar_of_its_slot_once(fleet: EmbeddedServer) -> None:
    """It comes with the next heartbeat; one for an earlier user of the slot never."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    packed = Notice(decided_s=1.5, predicted_tokens=0, actual_tokens=16, hashes=b"h" * 8).encode()
    assert fleet.call(fleet_functions.notice(FLEET.fleet_id, slot, generation, packed)) == 1
    assert fleet.call(fleet_functions.notice(FLEET.fleet_id, slot, generation + 1, packed)) == 0

    beat = make_heartbeat(FLEET, slot, generation, counters=None)
    first = fleet_functions.heartbeat_reply(fleet.call(beat))
    second = fleet_functions.heartbeat_reply(fleet.call(beat))
    assert first is not None
    assert second is not None
    assert (packed,) == first.notices
    assert second.notices == ()
    assert Notice.decode(packed).hashes == b"h" * 8


def test_only_the_newest_notices_wait(fleet: EmbeddedServer) -> None:
    """A sidecar that is away finds a bounded list, the oldest gone."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    for i in range(NOTICES_PER_SLOT_MAX + 3):
        fleet.call(fleet_functions.notice(FLEET.fleet_id, slot, generation, b"%d" % i))
    reply = fleet_functions.heartbeat_reply(
        fleet.call(make_heartbeat(FLEET, slot, generation, counters=None))
    )
    assert reply is not None
    assert [b"%d" % i for i in range(3, NOTICES_PER_SLOT_MAX + 3)] == list(reply.notices)


def test_a_heartbeat_tells_how_complete_the_index_is(fleet: EmbeddedServer) -> None:
    """Blocks and completeness stand in the counters, for routers and operators."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    index = IndexCounters(blocks=7, completeness_ratio=0.25)
    fleet.call(make_heartbeat(FLEET, slot, generation, index=index, counters=None))
    row = fleet.counters(FLEET).slots[slot]
    assert (row["index_blocks"], row["completeness_millionths"]) == (7, 250_000)


def test_a_heartbeat_that_was_long_under_way_renews_nothing(fleet: EmbeddedServer) -> None:
    """Its sender stood still meanwhile: what it knew may have changed since the lease ended."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    first = fleet_functions.heartbeat_reply(
        fleet.call(make_heartbeat(FLEET, slot, generation, counters=None))
    )
    assert isinstance(first, HeartbeatReply)
    leased_s = fleet.counters(FLEET).slots[slot]["lease_until_s"]
    idle = EngineCounters(running_count=1, waiting_count=0, kv_usage_ratio=0.5)
    for ago_s, kind in ((INSTANCE_LEASE_TTL_S + 1, TooLate), (1.0, HeartbeatReply)):
        known_s = first.now_s - ago_s
        beat = make_heartbeat(FLEET, slot, generation, counters=idle, known_s=known_s)
        reply = fleet_functions.heartbeat_reply(fleet.call(beat))
        assert isinstance(reply, kind)
        assert reply.now_s >= first.now_s
        row = fleet.counters(FLEET).slots[slot]
        assert (row["lease_until_s"] > leased_s) == (row["running_count"] == 1) == (ago_s == 1.0)


def test_a_heartbeat_gets_past_keys_of_another_type(fleet: EmbeddedServer) -> None:
    """Notices and budgets that are none are deleted; the beat counts and the next is as ever."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    notices, budgets = keys.notices(FLEET.fleet_id, slot), keys.budgets(FLEET.fleet_id)
    fleet.redis.set(notices, "text")
    fleet.redis.set(budgets, "text")
    awaited = keys.awaited(FLEET.fleet_id, slot)
    fleet.redis.set(awaited, "text")
    beat = make_heartbeat(FLEET, slot, generation, counters=None)
    reply = fleet_functions.heartbeat_reply(fleet.call(beat))
    assert reply is not None
    assert (reply.budget_blocks, reply.notices) == (None, ())
    assert not fleet.redis.exists(notices, budgets, awaited)
