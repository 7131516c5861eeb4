"""A Redis at its maxmemory (noeviction): what goes on, what is refused, and how."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import redis.exceptions
from builders import make_fleet_record, make_heartbeat
from contract.embedded_server import EmbeddedServer

from indexer.contract import (
    audit,
    fleet_functions,
    index_functions,
    libraries,
    quota,
    request_classes,
    reservations,
    responses,
    upkeep,
)
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import BlockHash, InstanceId, RouterId, SlotIndex
from indexer.contract.records import Notice

FLEET = make_fleet_record(bucket_bits=4)
ID = FLEET.fleet_id
SLOT, GENERATION = SlotIndex(0), 1
ROUTER = RouterId("r")
HASHES = [BlockHash(bytes([n]) * 8) for n in range(1, 20)]
CANDIDATES = np.array([(SLOT, GENERATION, 5)], reservations.CANDIDATE)
PACKED = Notice(decided_s=1.0, predicted_tokens=0, actual_tokens=16, hashes=b"h" * 8).encode()
RESPONSE, HELD_BY = responses.id_digest("resp_1"), InstanceId("host:8000/0#1")

GO_ON = {
    "create": (fleet_functions.create(FLEET), None),
    "join": (fleet_functions.join(ID, b"\x80"), [1, 1]),
    "open": (index_functions.open_slot(FLEET, SlotIndex(1), 1), 1),
    "announce": (fleet_functions.announce(ID, SLOT, GENERATION, b"\x80\x80"), 1),
    "heartbeat": (make_heartbeat(FLEET, SLOT, GENERATION, counters=None), None),
    "read": (reservations.read(ID), None),
    "classes": (request_classes.classes(ID), None),
    "audit": (audit.audit(ID), None),
    "balance": (audit.balance(ID), [0, 0]),
    "lookup": (index_functions.lookup(FLEET, 0, b"".join(HASHES[:9])), None),
    "lookups": (
        index_functions.lookups(replace(FLEET, partitions=2), HASHES[0], together=True)[0],
        None,
    ),
    "keep": (index_functions.keep(FLEET, 0, 0, 16), None),
    "remove": (index_functions.remove(FLEET, SLOT, GENERATION, HASHES[8::-1]), 1),
    "sweep": (index_functions.sweep(FLEET, SLOT, GENERATION, 0, 16), 9),
    "close": (fleet_functions.close(ID, SLOT, GENERATION, -1), 1),
    "list": (upkeep.list_fleet(ID), 1),
    "lease": (upkeep.lease(ID, b"me", 10.0), 1),
    "budgets": (upkeep.budgets(ID, {(SLOT, GENERATION): 4}), 1),
    "measure": (upkeep.measure(FLEET, 0, range(16)), None),
    "register": (reservations.register(ID, RouterId("new"), begin=True), 1),
    "reserve": (reservations.reserve(ID, ROUTER, 2, CANDIDATES), None),
    "await": (reservations.await_block(ID, ROUTER, 1, HASHES[0]), 1),
    "prefilled": (reservations.prefilled(ID, ROUTER, 1), 1),
    "release": (reservations.release(ID, ROUTER, 1), 1),
    "release of what was never reserved": (reservations.release(ID, ROUTER, 9), 0),
    "sync": (reservations.sync(ID, ROUTER, b"", forget_tombstones=True), [0, 1]),
    "reap": (reservations.reap(ID, ROUTER), [b"r", 1]),
    "response_holder": (responses.find(RESPONSE), None),
    "quota_take": (
        quota.take(
            "key",
            "me",
            in_flight=1,
            concurrent_max=2,
            tokens_count=1,
            requests=quota.UNLIMITED,
            tokens=quota.UNLIMITED,
        ),
        [0, 0, -1, -1, 1],
    ),
    "quota_settle": (
        quota.settle("key", "me", in_flight=0, tokens=quota.UNLIMITED, tokens_count=1),
        1,
    ),
}
REFUSED = {
    "store": index_functions.store(FLEET, SLOT, GENERATION, HASHES[9:]),
    "notice": fleet_functions.notice(ID, SLOT, GENERATION, PACKED),
    "response_hold": responses.hold(RESPONSE, responses.Holder.of(ID, HELD_BY), kept_s=60),
}


@pytest.fixture
def full(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A fleet of one instance with nine blocks and one reservation; then memory is full."""
    server.found(FLEET)
    assert server.call(fleet_functions.join(ID, b"\x80")) == [SLOT, GENERATION]
    assert server.call(index_functions.open_slot(FLEET, SLOT, GENERATION)) == 1
    assert server.call(index_functions.store(FLEET, SLOT, GENERATION, HASHES[:9])) == 1
    assert server.call(reservations.register(ID, ROUTER, begin=True)) == 1
    assert server.call(reservations.reserve(ID, ROUTER, 1, CANDIDATES))[0] == b"ok"
    server.redis.config_set("maxmemory", 1)
    try:
        yield server
    finally:
        server.redis.config_set("maxmemory", 0)


@pytest.mark.parametrize("name", GO_ON)
def test_what_goes_on(full: EmbeddedServer, name: str) -> None:
    """Membership, reservations, upkeep and everything that frees memory need none to be left."""
    call, expected = GO_ON[name]
    answer = full.call(call)
    assert expected in (None, answer)
    assert answer != []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(full: EmbeddedServer, name: str) -> None:
    """What grows with traffic is refused whole, as weather, and changes nothing."""
    before = full.redis.dbsize()
    with pytest.raises(redis.exceptions.OutOfMemoryError) as refused:
        full.call(REFUSED[name])
    assert isinstance(refused.value, REDIS_WEATHER)
    assert full.redis.dbsize() == before
    out = np.zeros(256, np.int64)
    index_functions.depths(full.call(index_functions.lookup(FLEET, 0, b"".join(HASHES))), out)
    assert out[SLOT] == 9


def test_every_function_is_accounted_for() -> None:
    """A new function has to say what it does when memory is full."""
    named = {name.split()[0] for name in GO_ON} | set(REFUSED) | {"free"}
    registered = {name.removeprefix("ts1_") for name in libraries.server_names()}
    assert registered == named


def test_a_closed_slot_is_freed(full: EmbeddedServer) -> None:
    """Leaving goes on to its end."""
    assert full.call(fleet_functions.close(ID, SLOT, GENERATION, -1)) == 1
    assert full.call(fleet_functions.free(ID, SLOT, GENERATION)) == 1
