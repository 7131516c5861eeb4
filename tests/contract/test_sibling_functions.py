"""What requests in prefill tell each other on a real server has an end and a bound."""

import time
from dataclasses import replace

import numpy as np
import pytest
from builders import make_fleet_record, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates, tailed

from indexer.contract import fleet_functions, keys, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.limits import SIBLING_TTL_S
from indexer.contract.milestones import Milestones
from indexer.contract.reservations import InFlight

FLEET = make_fleet_record(bucket_bits=4, epoch=0xFEDCBA9876543210)
RECORD = make_instance().encode()
TTL_PLACE = 12
"""Of the arguments of a reservation: for how long siblings are told."""


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """A newly founded, empty fleet."""
    server.found(FLEET)
    return server


def in_flight(milestones: Milestones, count: int = 1) -> InFlight:
    """For candidates with 16-token blocks."""
    return InFlight(milestones=milestones, block_size_tokens=np.full(count, 16))


def test_what_siblings_are_told_expires(fleet: EmbeddedServer) -> None:
    """Keys have an end, and what is said has one of its own, even where others keep the key."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    milestones, prompt = tailed(40, 0)
    row = candidates((slot, generation, prompt.tokens))
    call = reservations.reserve(
        FLEET.fleet_id, router, 1, row, in_flight=in_flight(milestones), choice=0
    )
    ttl_ms = call.args[TTL_PLACE]
    assert ttl_ms == SIBLING_TTL_S * 1000
    fleet.call(call)
    told = list(fleet.redis.scan_iter(f"{keys.sibling_prefix(FLEET.fleet_id)}*"))
    assert len(told) == len(prompt.milestones)
    assert all(0 < fleet.redis.pttl(key) <= ttl_ms for key in told)
    assert reservations.siblings(
        fleet.call(reservations.read(FLEET.fleet_id, milestones))
    ).tolist() == [(slot, generation, 640)]

    for key in told:
        fleet.redis.delete(key)
    args = list(call.args)
    args[1], args[TTL_PLACE] = (2).to_bytes(8, "little"), 1
    fleet.call(replace(call, args=tuple(args)))
    for key in told:
        fleet.redis.persist(key)
    deadline_s = time.monotonic() + 5
    while reservations.siblings(fleet.call(reservations.read(FLEET.fleet_id, milestones))).size:
        assert time.monotonic() < deadline_s, "a sibling is credited for ever"


def test_a_prefix_names_a_bounded_number_of_siblings(fleet: EmbeddedServer) -> None:
    """Beyond 64 slots nobody is added; who is there may say so again."""
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    milestones, prompt = tailed(18, 0)
    for number in range(70):
        slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
        row = candidates((slot, generation, prompt.tokens))
        call = reservations.reserve(
            FLEET.fleet_id, router, number, row, in_flight=in_flight(milestones)
        )
        assert fleet.call(call)[0] == b"ok"
    told = list(fleet.redis.scan_iter(f"{keys.sibling_prefix(FLEET.fleet_id)}*"))
    assert {fleet.redis.hlen(key) for key in told} == {64}


def test_a_repeated_reservation_tells_what_was_booked(fleet: EmbeddedServer) -> None:
    """Its own tokens do not make it its own sibling, and it books nothing."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    milestones, prompt = tailed(40, 0)
    call = reservations.reserve(
        FLEET.fleet_id,
        router,
        1,
        candidates((slot, generation, prompt.tokens)),
        in_flight=in_flight(milestones),
    )
    first, again = fleet.call(call), fleet.call(call)
    assert first == again
    row = fleet.counters(FLEET).slots[slot]
    assert (row["reserved_requests"], row["reserved_prefill_tokens"]) == (1, prompt.tokens)
