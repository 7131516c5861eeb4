"""Membership and reservations on a real server behave as their Python twins do."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from builders import make_fleet_record, make_heartbeat, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates, tailed
from contract.reference import ReferenceFleet, Reservation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from indexer.contract import fleet_functions, keys, reservations
from indexer.contract.identifiers import BlockHash, FleetId, RouterId, SlotIndex
from indexer.contract.records import EngineCounters, SlotFlag
from indexer.contract.reservations import InFlight

FLEET = make_fleet_record(bucket_bits=4, epoch=0xFEDCBA9876543210)
RECORD = make_instance().encode()
ROUTERS = st.sampled_from(["a", "b"])
SEQUENCES = st.integers(1, 6)
BLOCKS = st.sampled_from([BlockHash(letter * 8) for letter in (b"a", b"b")])
KeyOfFleet = Callable[[FleetId], str]
TAILS = st.sampled_from([None, *((shared, tail) for shared in (18, 40) for tail in (0, 20, 37))])
"""A prompt without siblings, or blocks it shares with the others and blocks of its own."""


@pytest.fixture
def fleet(server: EmbeddedServer) -> EmbeddedServer:
    """A newly founded, empty fleet."""
    server.found(FLEET)
    return server


def block(r: Reservation) -> BlockHash | None:
    """What it awaits."""
    return None if r.awaited is None else BlockHash(r.awaited)


class Books(RuleBasedStateMachine):
    """Any history of joins, reservations, losses and deaths, on the server and in the twin."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__()
        self.server = server
        server.found(FLEET)
        self.reference = ReferenceFleet()
        self.ended: Counter[tuple[str, int]] = Counter()

    def sequence(self, router: str, number: int) -> int:
        """Routers never use a number twice for requests that were booked."""
        return number + 10 * self.ended[router, number]

    @rule()
    def join(self) -> None:
        expected = self.reference.join()
        assert tuple(self.server.call(fleet_functions.join(FLEET.fleet_id, RECORD))) == expected

    @precondition(lambda self: any(s.used for s in self.reference.slots.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        used = [i for i, s in self.reference.slots.items() if s.used]
        slot = data.draw(st.sampled_from(used))
        generation = self.reference.slots[slot].generation
        assert self.server.call(fleet_functions.close(FLEET.fleet_id, slot, generation, -1)) == 1
        assert self.server.call(fleet_functions.free(FLEET.fleet_id, slot, generation)) == 1
        self.reference.leave(slot)

    @rule(router=ROUTERS)
    def register(self, router: str) -> None:
        call = reservations.register(FLEET.fleet_id, RouterId(router), begin=True)
        assert self.server.call(call) == 1
        self.reference.ledgers.setdefault(router, {})

    @precondition(lambda self: self.reference.slots)
    @rule(router=ROUTERS, number=SEQUENCES, tail=TAILS, data=st.data())
    def reserve(
        self, router: str, number: int, tail: tuple[int, int] | None, data: st.DataObject
    ) -> None:
        sequence = self.sequence(router, number)
        milestones, prompt = tailed(*tail) if tail else (None, None)
        new_tokens = st.integers(1, 50)
        if prompt:
            new_tokens = st.sampled_from([prompt.tokens, prompt.tokens - 272, 1])
        rows, blocks = [], []
        for slot, s in self.reference.slots.items():
            generation = data.draw(st.sampled_from([s.generation, s.generation + 1]))
            rows.append((slot, generation, data.draw(new_tokens)))
            blocks.append(data.draw(st.sampled_from([16, 64])))
        slow = st.lists(st.sampled_from([1000, 2000, 5000]), min_size=len(rows), max_size=len(rows))
        slowness = data.draw(st.none() | slow)
        expected = self.reference.reserve(router, sequence, rows, prompt, blocks, slowness=slowness)
        in_flight = milestones and InFlight(
            milestones=milestones, block_size_tokens=np.array(blocks)
        )
        call = reservations.reserve(
            FLEET.fleet_id,
            RouterId(router),
            sequence,
            candidates(*rows),
            in_flight=in_flight,
            slowness=None if slowness is None else np.array(slowness),
        )
        status, index, states = self.server.call(call)
        assert (status.decode(), index) == expected
        if status == b"ok":
            told = np.frombuffer(states, reservations.CANDIDATE_STATE)["new_prefill_tokens"][index]
            booked = self.reference.ledgers[router][sequence]
            assert booked is not None
            assert told == booked.tokens or not booked.prefill

    @rule(tail=TAILS)
    def look(self, tail: tuple[int, int] | None) -> None:
        """What a look tells of siblings is what a reservation would count."""
        milestones, prompt = tailed(*tail) if tail else (None, None)
        reply = self.server.call(reservations.read(FLEET.fleet_id, milestones))
        told = {slot: tokens for slot, _, tokens in reservations.siblings(reply).tolist()}
        expected = {
            slot: depth
            for slot in self.reference.slots
            if prompt and (depth := self.reference.in_flight(slot, prompt))
        }
        assert told == expected

    @rule(router=ROUTERS, number=SEQUENCES)
    def prefilled(self, router: str, number: int) -> None:
        sequence = self.sequence(router, number)
        self.server.call(reservations.prefilled(FLEET.fleet_id, RouterId(router), sequence))
        self.reference.prefilled(router, sequence)

    @rule(router=ROUTERS, number=SEQUENCES, block=BLOCKS)
    def await_block(self, router: str, number: int, block: BlockHash) -> None:
        sequence = self.sequence(router, number)
        call = reservations.await_block(FLEET.fleet_id, RouterId(router), sequence, block)
        assert self.server.call(call) == self.reference.await_(router, sequence, block)

    @precondition(lambda self: any(s.used for s in self.reference.slots.values()))
    @rule(stored=st.sets(BLOCKS), data=st.data())
    def heartbeat(self, stored: set[BlockHash], data: st.DataObject) -> None:
        used = [i for i, s in self.reference.slots.items() if s.used]
        slot = data.draw(st.sampled_from(used))
        generation = self.reference.slots[slot].generation
        blocks = sorted(stored)
        beat = make_heartbeat(FLEET, SlotIndex(slot), generation, counters=None, stored=blocks)
        reply = fleet_functions.heartbeat_reply(self.server.call(beat))
        assert reply is not None
        assert reply.prefills_ended_count == self.reference.stored(slot, set(stored))
        assert len(set(reply.awaited)) == len(reply.awaited)
        assert set(reply.awaited) == self.reference.awaited(slot)
        assert reply.reserved_prefill_tokens == self.reference.slots[slot].tokens

    @rule(router=ROUTERS, number=SEQUENCES)
    def release(self, router: str, number: int) -> None:
        sequence = self.sequence(router, number)
        booked = self.server.call(reservations.release(FLEET.fleet_id, RouterId(router), sequence))
        self.reference.release(router, sequence)
        self.ended[router, number] += booked == 1

    @rule(router=ROUTERS)
    def reap(self, router: str) -> None:
        self.server.call(reservations.reap(FLEET.fleet_id, RouterId(router)))
        self.reference.reap(router)
        self.ended.update((router, number) for number in range(1, 7))

    @precondition(lambda self: self.reference.ledgers)
    @rule(data=st.data())
    def lose_and_sync(self, data: st.DataObject) -> None:
        """Redis forgets part of a ledger (as after a failover); the router sends it whole."""
        router = data.draw(st.sampled_from(sorted(self.reference.ledgers)))
        ledger = self.reference.ledgers[router]
        live = {s: r for s, r in ledger.items() if r is not None}
        forgotten = data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()
        for sequence in forgotten:
            self.server.call(reservations.release(FLEET.fleet_id, RouterId(router), sequence))
        behind = data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()
        packed = b"".join(
            reservations.sync_row(
                s, r.slot, r.generation, r.tokens * r.prefill, int(not r.prefill), awaited=block(r)
            )
            if s in forgotten or r.prefill or s not in behind
            else reservations.sync_row(s, r.slot, r.generation, 7, 0, awaited=BlockHash(b"b" * 8))
            for s, r in live.items()
        )  # of some the router has not heard that their prefill has ended
        call = reservations.sync(FLEET.fleet_id, RouterId(router), packed, forget_tombstones=True)
        booked, _ = self.server.call(call)
        lost = {s for s in forgotten if not self.reference.holds(live[s])}
        assert booked == len(forgotten) - len(lost)
        self.reference.ledgers[router] = {s: r for s, r in live.items() if s not in lost}
        for r in live.values():
            r.tokens *= r.prefill

    @invariant()
    def counters_equal(self) -> None:
        slots = self.server.counters(FLEET).slots
        for i, expected in self.reference.slots.items():
            row = slots[i]
            assert expected.requests == row["reserved_requests"]
            assert expected.tokens == row["reserved_prefill_tokens"]

    def teardown(self) -> None:
        for router in ("a", "b"):
            self.server.call(reservations.reap(FLEET.fleet_id, RouterId(router)))
        slots = self.server.counters(FLEET).slots
        assert not slots["reserved_requests"].any()
        assert not slots["reserved_prefill_tokens"].any()
        assert not list(self.server.redis.scan_iter("*ledger*"))
        assert not list(self.server.redis.scan_iter("*:w:*"))


def test_the_books_equal_the_reference_under_any_history(server: EmbeddedServer) -> None:
    """Counters and ledgers equal the twin's after every step, and zero when everybody has left."""
    run_state_machine_as_test(lambda: Books(server), settings=settings(stateful_step_count=20))


def test_the_first_to_create_a_fleet_fixes_its_shape(fleet: EmbeddedServer) -> None:
    """Whoever comes later is told what the fleet is."""
    other = make_fleet_record(block_size_tokens=64, partitions=4, bucket_bits=9, epoch=7)
    assert (
        fleet_functions.fleet_record(FLEET.fleet_id, fleet.call(fleet_functions.create(other)))
        == FLEET
    )
    assert fleet.counters(FLEET).epoch == FLEET.epoch


def test_a_full_fleet_refuses_to_be_joined(fleet: EmbeddedServer) -> None:
    """257 instances do not fit one partition of 256 slots; a freed slot is given out again."""
    for slot in range(256):
        assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD)) == [slot, 1]
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD)) == []
    fleet.call(fleet_functions.close(FLEET.fleet_id, 77, 1, -1))
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD)) == []  # not swept yet
    fleet.call(fleet_functions.free(FLEET.fleet_id, 77, 1))
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD)) == [77, 2]


def test_instances_spread_over_partitions(server: EmbeddedServer) -> None:
    """The emptiest partition takes the next instance, at its lowest free slot."""
    server.clear()
    wide = make_fleet_record(partitions=3)
    server.call(fleet_functions.create(wide))
    got = [server.call(fleet_functions.join(FLEET.fleet_id, RECORD))[0] for _ in range(6)]
    assert got == [0, 256, 512, 1, 257, 513]


def test_foreign_requests_are_those_nobody_reserved(fleet: EmbeddedServer) -> None:
    """What an engine reports beyond the most that was reserved since its last report is foreign."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    fleet.call(reservations.reserve(FLEET.fleet_id, router, 1, candidates((slot, generation, 5))))
    report = EngineCounters(running_count=3, waiting_count=1, kv_usage_ratio=0.25)

    fleet.call(make_heartbeat(FLEET, slot, generation, counters=report))
    assert fleet.counters(FLEET).slots[slot]["foreign_requests"] == 3

    # The request ends between the engine's count and the heartbeat: still not foreign.
    fleet.call(reservations.release(FLEET.fleet_id, router, 1))
    fleet.call(make_heartbeat(FLEET, slot, generation, counters=report))
    assert fleet.counters(FLEET).slots[slot]["foreign_requests"] == 3

    idle = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0)
    fleet.call(make_heartbeat(FLEET, slot, generation, counters=idle))
    assert fleet.counters(FLEET).slots[slot]["foreign_requests"] == 0


def test_a_slot_that_was_closed_refuses_heartbeats_and_requests(fleet: EmbeddedServer) -> None:
    """A paused sidecar that comes back finds its slot gone."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    assert (
        fleet.call(fleet_functions.close(FLEET.fleet_id, slot, generation, 30.0)) == 0
    )  # lease lives
    assert fleet.call(fleet_functions.close(FLEET.fleet_id, slot, generation, -1)) == 1
    assert fleet.call(make_heartbeat(FLEET, slot, generation, counters=None)) == []
    call = reservations.reserve(FLEET.fleet_id, router, 1, candidates((slot, generation, 5)))
    assert fleet.call(call)[0] == b"gone"


def test_a_choice_is_refused_when_its_batch_has_moved(fleet: EmbeddedServer) -> None:
    """A policy learns that its choice has other counters by now, and what they are."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    first = candidates((slot, generation, 5))
    fleet.call(reservations.reserve(FLEET.fleet_id, router, 1, first, prompt_tokens=20))
    rows = candidates((slot, generation, 9))

    call = reservations.reserve(FLEET.fleet_id, router, 2, rows, choice=0, expected_batch_size=0)
    status, index, states = fleet.call(call)
    assert (status, index) == (b"moved", 0)
    assert np.frombuffer(states, reservations.CANDIDATE_STATE).tolist() == [(5, 1, 9)]

    call = reservations.reserve(FLEET.fleet_id, router, 2, rows, choice=0, expected_batch_size=1)
    assert fleet.call(call)[:2] == [b"ok", 0]


def test_a_dead_router_is_reaped_exactly_once(fleet: EmbeddedServer) -> None:
    """The first caller after the lease has ended takes everything back; the next finds nothing."""
    slot, generation = fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    router = RouterId("a")
    fleet.call(reservations.register(FLEET.fleet_id, router, begin=True))
    for sequence in range(5):
        fleet.call(
            reservations.reserve(
                FLEET.fleet_id, router, sequence, candidates((slot, generation, 7))
            )
        )
    assert fleet.call(reservations.reap(FLEET.fleet_id)) == []  # its lease lives
    fleet.redis.zadd(keys.routers(FLEET.fleet_id), {router: 1.0})  # ended long ago

    assert fleet.call(reservations.reap(FLEET.fleet_id)) == [b"a", 5]
    assert fleet.call(reservations.reap(FLEET.fleet_id)) == []
    assert fleet.counters(FLEET).slots[slot]["reserved_requests"] == 0
    assert fleet.call(reservations.register(FLEET.fleet_id, router, begin=False)) == 0


def test_a_slot_is_given_up_for_another_in_one_step(fleet: EmbeddedServer) -> None:
    """An instance that has to move is in the fleet once, at every moment, also when it is full."""
    former = tuple(fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD)))
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD, former=former)) == [1, 1]
    flags = fleet.counters(FLEET).slots["flags"]
    assert flags[0] & SlotFlag.CLOSING
    assert flags[1] == SlotFlag.USED

    others_former = (SlotIndex(1), 7)  # the slot has passed on
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD, former=others_former)) == [2, 1]
    assert fleet.counters(FLEET).slots["flags"][1] == SlotFlag.USED


def test_a_draining_instance_joins_draining(fleet: EmbeddedServer) -> None:
    """It is not eligible before its first heartbeat either, and cannot join as closing."""
    state = SlotFlag.DRAINING | SlotFlag.CLOSING
    assert fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD, state=state)) == [0, 1]
    assert fleet.counters(FLEET).slots["flags"][0] == SlotFlag.USED | SlotFlag.DRAINING


@pytest.mark.parametrize("lost", [keys.fleet, keys.counters])
def test_a_fleet_begins_without_instances(fleet: EmbeddedServer, lost: KeyOfFleet) -> None:
    """Whichever part of an earlier one was lost, nobody is in it by the records."""
    fleet.call(fleet_functions.join(FLEET.fleet_id, RECORD))
    fleet.redis.delete(lost(FLEET.fleet_id))
    fleet.call(fleet_functions.create(FLEET))
    assert not fleet.redis.exists(keys.instances(FLEET.fleet_id))
