"""The mean context of what is queued, beside the counters: who changes it, and who cannot."""

import numpy as np
import pytest
from builders import make_fleet_record, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates

from indexer.contract import fleet_functions, keys, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.reservations import LEDGER_TTL_S, context_tokens

FLEET = make_fleet_record(bucket_bits=4, epoch=0xFEDCBA9876543210)
ID = FLEET.fleet_id
ROUTER = RouterId("a")
KEY = keys.contexts(ID)


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """Two instances, in slots 0 and 1, and a registered router."""
    server.found(FLEET)
    for name in ("x", "y"):
        server.call(fleet_functions.join(ID, make_instance(name).encode()))
    server.call(reservations.register(ID, ROUTER, begin=True))
    return server


def book(fleet: EmbeddedServer, sequence: int, slot: int, new: int, prompt_tokens: int) -> None:
    """A request of so many new tokens, on slot 0 or 1."""
    row = candidates((slot, 1, new))
    call = reservations.reserve(ID, ROUTER, sequence, row, prompt_tokens=prompt_tokens)
    assert fleet.call(call)[0] == b"ok"


def queued(fleet: EmbeddedServer) -> list[tuple[int, int]]:
    """Tokens queued on both slots, and what each of them attends to."""
    counters = fleet.counters(FLEET)
    tokens = counters.slots["reserved_prefill_tokens"][:2].tolist()
    return list(zip(tokens, counters.context_tokens(np.arange(2)).tolist(), strict=True))


def test_it_is_the_mean_over_queued_tokens_and_each_slots_own(fleet: EmbeddedServer) -> None:
    """100 tokens after 900 (950 each), 300 alone (150 each): (95,000 + 45,000) / 400 = 350."""
    book(fleet, 1, 1, 100, 1000)
    assert queued(fleet) == [(0, 0), (100, 950)]
    book(fleet, 2, 1, 300, 300)
    assert queued(fleet) == [(0, 0), (400, 350)]
    book(fleet, 3, 0, 10, 10)
    assert queued(fleet) == [(10, 5), (400, 350)]


def test_what_leaves_the_queue_is_average_and_an_empty_one_forgets(fleet: EmbeddedServer) -> None:
    """The end of a prefill changes tokens only; on an empty queue the next request says it anew."""
    book(fleet, 1, 0, 100, 1000)
    book(fleet, 2, 0, 300, 300)
    fleet.call(reservations.prefilled(ID, ROUTER, 1))
    assert queued(fleet)[0] == (300, 350)
    fleet.call(reservations.release(ID, ROUTER, 2))
    book(fleet, 3, 0, 4, 50)
    assert queued(fleet)[0] == (4, 48)


def test_whoever_does_not_tell_leaves_it_as_it_is(fleet: EmbeddedServer) -> None:
    """A reservation without a prompt's length counts as average, and is no zero in the mean."""
    book(fleet, 1, 0, 100, 1000)
    book(fleet, 2, 0, 100, 0)
    assert queued(fleet)[0] == (200, 950)


def test_a_sync_brings_it_back(fleet: EmbeddedServer) -> None:
    """After a loss a router's book says what its tokens attend to; decoding ones say nothing."""
    fleet.redis.delete(KEY)
    rows = [
        reservations.sync_row(1, 0, 1, 100, 0, context_tokens=context_tokens(1000, 100)),
        reservations.sync_row(2, 0, 1, 300, 0, context_tokens=context_tokens(300, 300)),
        reservations.sync_row(3, 0, 1, 0, 1, context_tokens=7000),
        reservations.sync_row(4, 1, 1, 9, 0),
    ]
    call = reservations.sync(ID, ROUTER, b"".join(rows), forget_tombstones=True)
    assert fleet.call(call) == [4, 0]
    assert queued(fleet) == [(400, 350), (9, 0)]


def test_a_sync_costs_a_look_at_it_for_each_slot(fleet: EmbeddedServer) -> None:
    """Not one for each request: after an outage routers have thousands, and Redis waits."""
    rows = [
        reservations.sync_row(n, n % 2, 1, 10, 0, context_tokens=100 * (1 + n % 2))
        for n in range(1, 101)
    ]
    fleet.redis.config_resetstat()
    call = reservations.sync(ID, ROUTER, b"".join(rows), forget_tombstones=True)
    assert fleet.call(call) == [100, 0]
    commands = fleet.redis.info("commandstats")
    assert (commands["cmdstat_mget"]["calls"], commands["cmdstat_setrange"]["calls"]) == (2, 102)
    assert queued(fleet) == [(500, 100), (500, 200)]


def test_a_key_of_another_type_stops_no_request(fleet: EmbeddedServer) -> None:
    """It reads as nothing known, and the next reservation puts the right one in its place."""
    fleet.redis.hset(KEY, "a", "b")
    assert queued(fleet) == [(0, 0), (0, 0)]
    book(fleet, 1, 1, 100, 1000)
    assert queued(fleet) == [(0, 0), (100, 950)]


def test_it_expires(fleet: EmbeddedServer) -> None:
    """Nothing of a fleet stays for ever."""
    book(fleet, 1, 0, 100, 1000)
    assert 0 < fleet.redis.ttl(KEY) <= LEDGER_TTL_S
