"""Classes of requests: the functions against their twin, and the bounds of what they keep."""

from collections.abc import Iterator

import numpy as np
import pytest
from builders import make_fleet_record, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates

from indexer.contract import fleet_functions, keys, libraries, request_classes, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.limits import CLASS_PLACES, CLASS_WINDOW_S, CLASSES_MAX
from indexer.contract.request_classes import ClassPrefixes, ClassReport, Saying, Told, Verdict
from loadgen.simulation.shared_books import SharedBooks

FLEET = make_fleet_record()
ID = FLEET.fleet_id
ROUTER = RouterId("r")
NOW = "return tonumber(t[1]) + tonumber(t[2]) / 1000000"
SET_NOW = "return tonumber(redis.call('GET', 'now_s'))"
SLOTS = 4


class Clocked:
    """A fleet of idle instances on a server whose clock the test sets, and its twin."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server, self.books, self.sequence = server, SharedBooks(SLOTS), 0
        self.at(1_000_000.0)
        for slot in range(SLOTS):
            server.call(fleet_functions.join(ID, make_instance(f"i{slot}").encode()))
            self.books.open(slot)
        rows = server.counters(FLEET).slots.copy()
        rows["lease_until_s"] = np.inf
        server.redis.setrange(keys.counters(ID), 32, rows.tobytes())
        server.call(reservations.register(ID, ROUTER, begin=True))

    def at(self, now_s: float) -> None:
        """It is now this time."""
        self.now_s = now_s
        self.server.redis.set("now_s", repr(now_s))

    def book(self, prefixes: ClassPrefixes, verdict: Verdict | None, flags: list[int]) -> None:
        """A request on the first slot, and its end, here and there."""
        self.sequence += 1
        report = ClassReport(
            prefixes=prefixes,
            verdict=verdict,
            holder_flags=b"" if verdict is None else bytes(flags),
        )
        rows = candidates(*((slot, 1, 9) for slot in range(SLOTS)))
        call = reservations.reserve(ID, ROUTER, self.sequence, rows, choice=0, classes=report)
        assert self.server.call(call)[0] == b"ok"
        key = (0, self.sequence)
        self.books.reserve(key, rows, None, now_s=self.now_s, choice=0, classes=report)
        self.server.call(reservations.release(ID, ROUTER, self.sequence))
        self.books.release(key)

    def recent(self, prefixes: ClassPrefixes) -> Told:
        """What the server says of a request that comes; the twin says the same."""
        told: Told = self.server.call(reservations.read(ID, prefixes=prefixes))[4]
        assert told == self.books.classes.recent(prefixes, self.now_s)
        return told


@pytest.fixture
def clocked(server: EmbeddedServer) -> Iterator[Clocked]:
    """The functions by a clock of the test's; afterwards by Redis's again."""
    text = libraries.text("fleet_v1.lua")
    assert text.count(NOW) == 1
    server.redis.execute_command("FUNCTION", "LOAD", "REPLACE", text.replace(NOW, SET_NOW))
    server.redis.flushdb()
    server.redis.set("now_s", "0")
    server.call(fleet_functions.create(FLEET))
    try:
        yield Clocked(server)
    finally:
        server.load()


def verdict_on(name: bytes, says: Saying = Saying.WATCHED, least: int = 2) -> Verdict:
    """Of the class with this name."""
    return Verdict(
        name=name, says=says, streak_least=least, depth_blocks=4, share=0.5, holders=least // 2
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_functions_equal_their_twin(clocked: Clocked, seed: int) -> None:
    """Any requests, verdicts and pauses: the same counts to the last bit, the same states."""
    rng = np.random.default_rng(seed)
    chains = [rng.bytes(8 * int(rng.integers(1, 70))) for _ in range(6)]
    chains += [chain[:64] + rng.bytes(160) for chain in chains if len(chain) > 64]
    some = [ClassPrefixes.of(one, pool % 3) for pool, one in enumerate((*chains, b""))]
    standings = set()
    for _ in range(150):
        clocked.at(
            clocked.now_s + float(rng.choice([0.01, 0.7, 4.0, 31.0], p=[0.5, 0.3, 0.18, 0.02]))
        )
        prefixes = some[int(rng.integers(len(some)))]
        verdict = None
        if len(prefixes) and rng.random() < 0.7:
            name = prefixes.name(int(rng.integers(len(prefixes))))
            says = Saying(int(rng.choice([1, 2, 3], p=[0.75, 0.2, 0.05])))
            verdict = verdict_on(name, says, int(rng.choice([2, 4])))
        clocked.book(prefixes, verdict, rng.integers(0, 2, SLOTS).tolist())
        asked = some[int(rng.integers(len(some)))]
        recent = request_classes.RecentClasses.decode(clocked.recent(asked))
        assert recent is not None
        standings |= set(recent.standings.tolist())
    assert standings == {0, 1, 2}
    _, told = request_classes.class_states(clocked.server.call(request_classes.classes(ID)))
    living = {
        name.hex(): (s.streak, s.steered, s.taken_out)
        for name, s in clocked.books.classes.states.items()
        if s.told_s >= clocked.now_s - CLASS_WINDOW_S
    }
    assert {s.name: (s.streak, s.steered_requests, s.taken_out) for s in told} == living


def test_what_is_kept_is_bounded_and_expires(clocked: Clocked) -> None:
    """However many prompts: a string of counters a window, 64 states, an end to all of them.

    States that nobody has told of for a window make room.
    """
    rng = np.random.default_rng(1)
    for number in range(3 * CLASSES_MAX):
        clocked.at(clocked.now_s + 0.01)
        prefixes = ClassPrefixes.of(rng.bytes(80))
        clocked.book(prefixes, verdict_on(prefixes.name(number % 4)), [1] * SLOTS)
    redis = clocked.server.redis
    assert redis.hlen(keys.class_states(ID)) == len(clocked.books.classes.states) == CLASSES_MAX
    counts = list(redis.scan_iter(keys.class_counts(ID, 0)[:-1] + "*"))
    assert len(counts) in {1, 2}
    assert all(redis.strlen(key) <= 4 * CLASS_PLACES.stop for key in counts)
    for key in (*counts, keys.class_states(ID)):
        assert 0 < redis.ttl(key) <= 2 * CLASS_WINDOW_S
    clocked.at(clocked.now_s + CLASS_WINDOW_S + 1)
    clocked.book(prefixes, verdict_on(rng.bytes(8)), [1] * SLOTS)
    assert redis.hlen(keys.class_states(ID)) == len(clocked.books.classes.states) == 1


def test_nothing_is_kept_of_requests_that_do_not_ask(clocked: Clocked) -> None:
    """Without a report a reservation counts nothing, and a read tells nothing."""
    rows = candidates((0, 1, 9))
    clocked.server.call(reservations.reserve(ID, ROUTER, 1, rows))
    assert not list(clocked.server.redis.scan_iter(keys.class_counts(ID, 0)[:-1] + "*"))
    assert clocked.server.call(reservations.read(ID))[4] == b""


def test_keys_of_another_type_are_replaced(clocked: Clocked) -> None:
    """Somebody's hand in Redis costs a count, never a reservation or a look."""
    redis = clocked.server.redis
    prefixes = ClassPrefixes.of(b"h" * 64)
    window = int(clocked.now_s // CLASS_WINDOW_S)
    for key in (keys.class_counts(ID, window), keys.class_states(ID)):
        redis.lpush(key, "x")
    redis.hset("elsewhere", prefixes.name(0), b"short")
    assert clocked.server.call(reservations.read(ID, prefixes=prefixes))[4] == b""
    assert request_classes.class_states(clocked.server.call(request_classes.classes(ID))) == (0, [])
    clocked.book(prefixes, None, [])
    redis.rename("elsewhere", keys.class_states(ID))
    assert clocked.server.call(reservations.read(ID, prefixes=prefixes))[4][3] == bytes(5 * 4)
    for _ in range(2):
        clocked.book(prefixes, verdict_on(prefixes.name(0)), [1] * SLOTS)
    assert redis.type(keys.class_counts(ID, window)) == b"string"
    requests, (state,) = request_classes.class_states(
        clocked.server.call(request_classes.classes(ID))
    )
    assert (requests, state.streak, state.taken_out) == (2, 2, True)
