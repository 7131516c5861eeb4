"""The books balance after every step of any history, by the audit that operators use."""

from functools import partial
from typing import Any

from builders import make_fleet_record, make_heartbeat, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from indexer.contract import audit, fleet_functions, keys, libraries, reservations
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, RouterId, SlotIndex
from indexer.contract.records import IndexCounters, SlotFlag

FLEET = make_fleet_record(bucket_bits=4)
F = FLEET.fleet_id
BLOCKS = tuple(BlockHash(bytes([n]) * 8) for n in range(1, 4))
ROUTERS = st.sampled_from([RouterId("a"), RouterId("b"), RouterId("c")])
SEQUENCES = st.integers(1, 8)
SLOTS, GENERATIONS = st.integers(0, 2), st.integers(1, 3)
OFFSET = "clock_offset"
NOW = "return tonumber(t[1]) + tonumber(t[2]) / 1000000"
SHIFTED = NOW + f" + tonumber(redis.call('GET', '{OFFSET}') or '0')"


def shifted_text() -> str:
    """The library with a clock that a test can set."""
    text = libraries.text("fleet_v1.lua")
    assert text.count(NOW) == 1
    return text.replace(NOW, SHIFTED)


class Books(RuleBasedStateMachine):
    """Calls of any order, repeated, late, under any clock; whatever a lost answer leads to."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__()
        self.server = server
        self.sent: list[Call] = []
        self.tampered = False
        server.found(FLEET)
        for _ in range(2):
            server.call(fleet_functions.join(F, make_instance().encode()))
        for router in "abc":
            server.call(reservations.register(F, RouterId(router), begin=True))

    def send(self, call: Call) -> Any:
        """Send, and keep for a repetition."""
        self.sent = [*self.sent[-20:], call]
        return self.server.call(call)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A call comes again, or late."""
        if self.sent:
            self.server.call(data.draw(st.sampled_from(self.sent)))

    @rule(seconds=st.sampled_from([-20, -3, 4, 15, 60]))
    def jump(self, seconds: int) -> None:
        self.server.redis.incrby(OFFSET, seconds)

    @rule()
    def found(self) -> None:
        self.send(fleet_functions.create(FLEET))

    @rule()
    def join(self) -> None:
        self.send(fleet_functions.join(F, make_instance().encode()))

    @rule(slot=SLOTS, generation=GENERATIONS, swept=st.booleans(), grace=st.sampled_from([-1, 30]))
    def close(self, slot: int, generation: int, swept: bool, grace: int) -> None:
        self.send(fleet_functions.close(F, slot, generation, grace))
        if swept:
            self.send(fleet_functions.free(F, slot, generation))

    @rule(slot=SLOTS, generation=GENERATIONS, stored=st.sets(st.sampled_from(BLOCKS)))
    def heartbeat(self, slot: int, generation: int, stored: set[BlockHash]) -> None:
        self.send(make_heartbeat(FLEET, slot, generation, counters=None))
        self.send(
            fleet_functions.heartbeat(
                FLEET,
                slot,
                generation,
                state=SlotFlag(0),
                index=IndexCounters(blocks=0, completeness_ratio=1.0),
                counters=None,
                stored=sorted(stored),
            )
        )

    @rule(router=ROUTERS, begin=st.booleans())
    def register(self, router: RouterId, begin: bool) -> None:
        self.send(reservations.register(F, router, begin=begin))

    @rule(router=ROUTERS, sequence=SEQUENCES, generation=GENERATIONS, tokens=st.integers(1, 99))
    def reserve(self, router: RouterId, sequence: int, generation: int, tokens: int) -> None:
        rows = candidates(*((slot, generation, tokens) for slot in range(3)))
        self.send(reservations.reserve(F, router, sequence, rows))

    @rule(router=ROUTERS, sequence=SEQUENCES, block=st.sampled_from(BLOCKS))
    def await_block(self, router: RouterId, sequence: int, block: BlockHash) -> None:
        self.send(reservations.await_block(F, router, sequence, block))

    @rule(router=ROUTERS, sequence=SEQUENCES)
    def prefilled(self, router: RouterId, sequence: int) -> None:
        self.send(reservations.prefilled(F, router, sequence))

    @rule(router=ROUTERS, sequence=SEQUENCES)
    def release(self, router: RouterId, sequence: int) -> None:
        self.send(reservations.release(F, router, sequence))

    @rule(
        router=ROUTERS,
        rows=st.dictionaries(
            SEQUENCES,
            st.tuples(SLOTS, GENERATIONS, st.integers(1, 99), st.sampled_from([None, *BLOCKS])),
        ),
        ended=st.booleans(),
        forget=st.booleans(),
    )
    def sync(self, router: RouterId, rows: dict[int, Any], ended: bool, forget: bool) -> None:
        packed = b"".join(
            reservations.sync_row(
                *(sequence, slot, generation, 0 if ended else tokens, int(ended)),
                awaited=None if ended else block,
            )
            for sequence, (slot, generation, tokens, block) in rows.items()
        )
        self.send(reservations.sync(F, router, packed, forget_tombstones=forget))

    @rule()
    def reap_dead(self) -> None:
        """Whoever's lease has ended, once: the next call names another or nobody."""
        reaped = [r[0] for _ in range(4) if (r := self.server.call(reservations.reap(F)))]
        assert len(reaped) == len(set(reaped))

    @rule(router=ROUTERS)
    def leave(self, router: RouterId) -> None:
        self.send(reservations.reap(F, router))

    @rule(lost=st.sampled_from(["all", "counters", "fleet", "instances"]))
    def lose(self, lost: str) -> None:
        """Redis comes back empty, or one key has expired; then a sidecar finds out and founds."""
        key = {"counters": keys.counters, "fleet": keys.fleet, "instances": keys.instances}
        if lost == "all":
            self.server.redis.flushall()
        else:
            self.server.redis.delete(key[lost](F))
        self.server.call(fleet_functions.create(FLEET))
        self.server.call(fleet_functions.join(F, make_instance().encode()))

    @rule(key=st.sampled_from([keys.routers(F), *(keys.ledger(F, RouterId(r)) for r in "abc")]))
    def tamper(self, key: str) -> None:
        """Somebody deletes a key by hand."""
        self.server.redis.delete(key)
        self.tampered = True

    @rule()
    def balance(self) -> None:
        self.server.call(audit.balance(F))
        self.tampered = False

    @invariant()
    def balances(self) -> None:
        """No difference; after a key was deleted by hand, at most too much is reserved."""
        books = audit.audited(self.server.call(audit.audit(F)))
        assert books.clamped_count == 0
        if self.tampered:
            assert all(d.requests >= 0 and d.prefill_tokens >= 0 for d in books.differences)
        else:
            assert books.balances, books

    def teardown(self) -> None:
        """Everybody leaves: nothing is reserved, no ledger, nothing awaited, all keys expire."""
        self.server.call(audit.balance(F))
        for router in "abc":
            self.server.call(reservations.reap(F, RouterId(router)))
        slots = self.server.counters(FLEET).slots
        assert not slots["reserved_requests"].any()
        assert not slots["reserved_prefill_tokens"].any()
        left = {key.decode() for key in self.server.redis.scan_iter("ts1:*")}
        # What was awaited on a slot that nobody has now goes when the slot is taken.
        unused = {
            keys.awaited(F, SlotIndex(slot))
            for slot in range(3)
            if slot >= len(slots) or not slots["flags"][slot]
        }
        assert left - unused <= {keys.fleet(F), keys.counters(F), keys.instances(F)}
        assert all(self.server.redis.ttl(key) > 0 for key in left)


def test_the_books_balance_after_every_step(server: EmbeddedServer) -> None:
    """No difference, nothing clamped; at the end zero, and no key without an expiry."""
    server.redis.execute_command("FUNCTION", "LOAD", "REPLACE", shifted_text())
    try:
        run_state_machine_as_test(partial(Books, server), settings=settings(stateful_step_count=40))
    finally:
        server.load()
