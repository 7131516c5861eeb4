"""A prefill ends once, whoever tells of it and in whatever order the messages come."""

import itertools
from collections.abc import Callable

import pytest
from builders import make_fleet_record, make_heartbeat, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates

from indexer.contract import fleet_functions, keys, reservations
from indexer.contract.identifiers import BlockHash, RouterId, SlotIndex
from indexer.contract.limits import AWAITED_PER_HEARTBEAT_MAX
from indexer.contract.records import HeartbeatReply

FLEET = make_fleet_record(bucket_bits=4)
ID, ROUTER, SLOT = FLEET.fleet_id, RouterId("a"), SlotIndex(0)
BLOCK, OTHER = BlockHash(b"a" * 8), BlockHash(b"b" * 8)
AWAITED = keys.awaited(ID, SLOT)


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """One instance, one router, one request of 70 tokens booked."""
    server.found(FLEET)
    server.call(fleet_functions.join(ID, make_instance().encode()))
    server.call(reservations.register(ID, ROUTER, begin=True))
    assert reserve(server, 1)[0] == b"ok"
    return server


def reserve(server: EmbeddedServer, sequence: int) -> list[bytes]:
    """Book a request of 70 tokens."""
    answer: list[bytes] = server.call(
        reservations.reserve(ID, ROUTER, sequence, candidates((SLOT, 1, 70)))
    )
    return answer


def beat(server: EmbeddedServer, *stored: BlockHash, generation: int = 1) -> HeartbeatReply:
    """The sidecar tells what its engine has stored."""
    call = make_heartbeat(FLEET, SLOT, generation, counters=None, stored=stored)
    reply = fleet_functions.heartbeat_reply(server.call(call))
    assert reply is not None
    return reply


def booked(server: EmbeddedServer) -> tuple[int, int]:
    """Requests and queued prefill tokens of the slot."""
    row = server.counters(FLEET).slots[SLOT]
    return int(row["reserved_requests"]), int(row["reserved_prefill_tokens"])


def sync(server: EmbeddedServer, tokens: int = 70, state: int = 0) -> list[int]:
    """The router's whole book: the one request, awaited."""
    row = reservations.sync_row(1, SLOT, 1, tokens, state, awaited=None if state else BLOCK)
    answer: list[int] = server.call(reservations.sync(ID, ROUTER, row, forget_tombstones=False))
    return answer


STEPS: dict[str, Callable[[EmbeddedServer], object]] = {
    "await": lambda server: server.call(reservations.await_block(ID, ROUTER, 1, BLOCK)),
    "stored": lambda server: beat(server, BLOCK),
    "prefilled": lambda server: server.call(reservations.prefilled(ID, ROUTER, 1)),
    "release": lambda server: server.call(reservations.release(ID, ROUTER, 1)),
    "reap": lambda server: server.call(reservations.reap(ID, ROUTER)),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids="-".join)
def test_every_order_ends_at_nothing(fleet: EmbeddedServer, order: tuple[str, ...]) -> None:
    """Each message comes twice, beside a second request that keeps its own; nothing is left."""
    other = RouterId("b")
    fleet.call(reservations.register(ID, other, begin=True))
    fleet.call(reservations.reserve(ID, other, 1, candidates((SLOT, 1, 30))))
    fleet.call(reservations.await_block(ID, other, 1, OTHER))
    for step in order:
        STEPS[step](fleet)
        STEPS[step](fleet)
        assert booked(fleet)[1] in (30, 100)
    assert booked(fleet) == (1, 30)
    assert fleet.redis.hgetall(AWAITED) == {(1).to_bytes(8, "little") + b"b": OTHER}
    assert beat(fleet, BLOCK, OTHER).prefills_ended_count == 1
    assert booked(fleet) == (1, 0)
    assert not fleet.redis.exists(AWAITED)


def test_the_sidecar_knows_before_the_router(fleet: EmbeddedServer) -> None:
    """What it has told stays, whatever the book of a router that did not hear of it says."""
    STEPS["await"](fleet)
    assert beat(fleet).awaited == (BLOCK,)
    assert beat(fleet, OTHER).awaited == (BLOCK,)
    ended = beat(fleet, BLOCK)
    assert (ended.prefills_ended_count, ended.reserved_prefill_tokens, ended.awaited) == (1, 0, ())
    assert sync(fleet) == [0, 0]
    assert booked(fleet) == (1, 0)
    STEPS["release"](fleet)
    assert booked(fleet) == (0, 0)


def test_what_was_lost_is_awaited_again(fleet: EmbeddedServer) -> None:
    """A book sent after a loss books the reservation and what it awaits, also a note lost alone."""
    assert sync(fleet) == [1, 0]
    assert beat(fleet).awaited == (BLOCK,)
    fleet.redis.delete(keys.ledger(ID, ROUTER), AWAITED)
    fleet.redis.delete(keys.counters(ID))
    fleet.call(fleet_functions.create(FLEET))
    fleet.call(fleet_functions.join(ID, make_instance().encode()))
    fleet.call(reservations.register(ID, ROUTER, begin=True))
    assert sync(fleet) == [1, 0]
    assert sync(fleet) == [0, 0]
    assert beat(fleet, BLOCK).prefills_ended_count == 1
    assert booked(fleet) == (1, 0)


def test_the_next_user_of_a_slot_awaits_nothing(fleet: EmbeddedServer) -> None:
    """What was awaited under another generation is gone, and can be awaited no more."""
    STEPS["await"](fleet)
    fleet.call(fleet_functions.close(ID, SLOT, 1, -1))
    fleet.call(fleet_functions.free(ID, SLOT, 1))
    assert not fleet.redis.exists(AWAITED)
    fleet.redis.hset(AWAITED, (1).to_bytes(8, "little") + b"a", BLOCK)  # as if it came late
    fleet.call(fleet_functions.join(ID, make_instance().encode()))
    assert not fleet.redis.exists(AWAITED)
    assert STEPS["await"](fleet) == 0
    fleet.call(reservations.reserve(ID, ROUTER, 2, candidates((SLOT, 2, 9))))
    fleet.redis.hset(AWAITED, (1).to_bytes(8, "little") + b"a", BLOCK)
    assert beat(fleet, BLOCK, generation=2).prefills_ended_count == 0
    assert booked(fleet) == (1, 9)


def test_more_than_one_answer_holds_are_told_in_turn(fleet: EmbeddedServer) -> None:
    """An answer stays bounded, and all prefills end in the course of some heartbeats."""
    count = AWAITED_PER_HEARTBEAT_MAX + 50
    for sequence in range(2, count + 1):
        if not sequence % 100:
            beat(fleet)  # a slow machine takes longer for all of these than an instance's lease
        assert reserve(fleet, sequence)[0] == b"ok"
        block = BlockHash(sequence.to_bytes(8, "little"))
        fleet.call(reservations.await_block(ID, ROUTER, sequence, block))
    told = beat(fleet).awaited
    assert len(told) == AWAITED_PER_HEARTBEAT_MAX
    for _ in range(100):
        told = beat(fleet, *told).awaited
        if booked(fleet) == (count, 70):
            break
    assert booked(fleet) == (count, 70)  # the first awaits nothing


def test_one_block_ends_every_prefill_that_awaits_it(fleet: EmbeddedServer) -> None:
    """It is named once."""
    reserve(fleet, 2)
    for sequence in (1, 2):
        fleet.call(reservations.await_block(ID, ROUTER, sequence, BLOCK))
    assert beat(fleet).awaited == (BLOCK,)
    assert beat(fleet, BLOCK).prefills_ended_count == 2
    assert booked(fleet) == (2, 0)
