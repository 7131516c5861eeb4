"""Laws of ending prefills by the engine's counts, against an engine that serves in order."""

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from indexer.awaited import ON_ITS_WAY_S, Awaited, FirstTokens
from indexer.contract.identifiers import BlockHash
from indexer.contract.records import EngineCounters
from indexer.engine.engine_metrics import EngineSample, RequestTotals
from indexer.table.block_table import BlockTable

TABLE = BlockTable(model_scope="m", block_size_tokens=16)
"""Nothing is stored: only counting tells."""


@dataclass(slots=True)
class Life:
    """One request: whether the engine has taken it in, and whether it has its first token."""

    name: BlockHash
    is_taken: bool = False
    has_first: bool = False


@dataclass(slots=True)
class Engine:
    """Serves in the order of arrival and shows itself as it was at the end of its last step.

    What arrives during a step is taken in at its end and shown at the end of the next one.
    """

    aborts_end: bool = True
    lives: list[Life] = field(default_factory=list)
    first_tokens_count: int = 0
    ended_count: int = 0
    names_count: int = 0
    shown: tuple[int, int, int, int] = (0, 0, 0, 0)

    def arrive(self) -> None:
        """One more request."""
        self.names_count += 1
        self.lives.append(Life(BlockHash(self.names_count.to_bytes(8, "big"))))

    def step(self, firsts: int, ends: int, partial: int) -> None:
        """So many get their first token, so many end, so many are half through their prompt."""
        taken = [life for life in self.lives if life.is_taken]
        for life in [life for life in taken if not life.has_first][:firsts]:
            life.has_first = True
            self.first_tokens_count += 1
        for life in [life for life in taken if life.has_first][:ends]:
            self.lives.remove(life)
            self.ended_count += 1
        owed = self.owed_count
        running = sum(life.has_first for life in self.lives) + min(partial, owed)
        waiting = owed - min(partial, owed)
        self.shown = (running, waiting, self.first_tokens_count, self.ended_count)
        for life in self.lives:
            life.is_taken = True

    def abort(self, place: int) -> None:
        """The client of one that was taken in has gone; shown at the end of a step."""
        taken = [life for life in self.lives if life.is_taken]
        if taken:
            self.lives.remove(taken[place % len(taken)])
            self.ended_count += self.aborts_end

    @property
    def owed_count(self) -> int:
        """First tokens to come for those that it has taken in."""
        return sum(life.is_taken and not life.has_first for life in self.lives)

    def sample(self) -> EngineSample:
        """What a scrape reads."""
        running, waiting, first_tokens, ended = self.shown
        return EngineSample(
            counters=EngineCounters(
                running_count=running, waiting_count=waiting, kv_usage_ratio=0.0
            ),
            sleep_level=None,
            totals=RequestTotals(first_tokens_count=first_tokens, ended_count=ended),
        )


STEPS = st.tuples(st.just("step"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1))
ARRIVAL, TAKING_IN = ("arrive", 0, 0, 0), ("step", 0, 0, 0)
ARRIVALS = st.just(ARRIVAL)
ABORTS = st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0))
BEATS = st.tuples(st.just("beat"), st.integers(1, 9), st.just(0), st.just(0))


def act(engine: Engine, what: str, one: int, two: int, three: int) -> None:
    """One event of an engine's life."""
    if what == "arrive":
        engine.arrive()
    elif what == "step":
        engine.step(one, two, three)
    elif what == "abort":
        engine.abort(one)


def beat(engine: Engine, awaited: Awaited, now_s: float) -> set[BlockHash]:
    """A scrape and its heartbeat; what it told as ended."""
    awaited.look(engine.sample(), now_s)
    told = set(awaited.ended(TABLE))
    alive = [life.name for life in engine.lives]
    left = [name for name in alive if name not in told]
    awaited.hear(left, len(alive), now_s)
    return told


@given(st.lists(STEPS | ARRIVALS, max_size=20), st.lists(STEPS | ARRIVALS | BEATS, max_size=60))
@example(  # two have come and gone, and the third is in prefill
    [ARRIVAL, ARRIVAL, TAKING_IN, ("step", 2, 2, 0), ARRIVAL, TAKING_IN, ("step", 0, 0, 1)],
    [("beat", 9, 0, 0), ("beat", 9, 0, 0)],
)
def test_a_prefill_is_told_after_its_first_token_and_soon(
    unseen: list[tuple[str, int, int, int]], events: list[tuple[str, int, int, int]]
) -> None:
    """Never before, whatever a long step hides; and by the time that nobody waits, of everybody.

    Whatever the engine did before it was looked at.
    """
    engine, awaited, now_s = Engine(), Awaited(), 0.0
    for event in unseen:
        act(engine, *event)
    beat(engine, awaited, now_s)
    told: set[BlockHash] = set()
    for event in events:
        act(engine, *event)
        if event[0] == "beat":
            now_s += event[1] / 10
            told |= beat(engine, awaited, now_s)
            early = {life.name for life in engine.lives if not life.has_first} & told
            assert not early
    for _ in range(2):
        engine.step(len(engine.lives), 0, 0)
    for _ in range(3):
        now_s += ON_ITS_WAY_S
        told |= beat(engine, awaited, now_s)
    assert {life.name for life in engine.lives} <= told


@given(st.booleans(), st.lists(STEPS | ARRIVALS | ABORTS, max_size=60))
def test_what_is_owed_stays_within_what_is_there(
    aborts_end: bool, events: list[tuple[str, int, int, int]]
) -> None:
    """From its waiting requests to all, whether or not aborts count; exact after it was idle."""
    engine, counted = Engine(aborts_end=aborts_end), FirstTokens()
    exact = True
    for event in events:
        exact = exact and event[0] != "abort"
        act(engine, *event)
        if event[0] != "step":
            continue  # nothing else is shown
        shown, totals = engine.sample().counters, engine.sample().totals
        assert totals is not None
        counted.look(totals, shown.running_count, shown.waiting_count)
        here = shown.running_count + shown.waiting_count
        assert shown.waiting_count <= counted.owed_count <= here
        exact = exact or here == 0
        if exact:
            owed = sum(not life.has_first for life in engine.lives)
            unseen = len(engine.lives) - here
            assert counted.owed_count == owed - unseen


def look(counted: FirstTokens, first_tokens: int, ended: int, running: int, waiting: int) -> int:
    """What is owed after these numbers were shown."""
    totals = RequestTotals(first_tokens_count=first_tokens, ended_count=ended)
    counted.look(totals, running, waiting)
    return counted.owed_count


def test_aborts_that_do_not_count_are_made_up_for() -> None:
    """On an engine that never idles: as soon as every running request has its first token."""
    counted = FirstTokens()
    assert look(counted, 0, 0, 0, 0) == 0
    assert look(counted, 8, 0, 8, 2) == 2
    assert look(counted, 8, 0, 3, 2) == 2, "five of the eight were aborted"
    assert look(counted, 8, 0, 5, 0) == 2, "the two are half through their prompts"
    assert look(counted, 10, 0, 5, 0) == 0


def test_aborts_that_count_as_ended_are_made_up_for() -> None:
    """Of requests that never had a first token: as soon as the engine runs nothing."""
    counted = FirstTokens()
    assert look(counted, 0, 0, 0, 4) == 4
    assert look(counted, 1, 3, 1, 0) == 1, "it might be a request without"
    assert look(counted, 1, 4, 0, 0) == 0
    assert look(counted, 2, 4, 1, 1) == 1


def heard(awaited: Awaited, sample: EngineSample, reserved: int, now_s: float) -> list[BlockHash]:
    """A beat with one ticket."""
    awaited.look(sample, now_s)
    told = awaited.ended(TABLE)
    awaited.hear([BlockHash(b"ticket..")], reserved, now_s)
    return told


def numbers(running: int, first_tokens: int, ended: int) -> EngineSample:
    """A sample of an engine where nobody waits."""
    return EngineSample(
        counters=EngineCounters(running_count=running, waiting_count=0, kv_usage_ratio=0.0),
        sleep_level=None,
        totals=RequestTotals(first_tokens_count=first_tokens, ended_count=ended),
    )


def test_a_request_may_be_on_its_way() -> None:
    """Traffic from elsewhere hides that it has not come; so it gets time to."""
    awaited = Awaited()
    assert heard(awaited, numbers(2, 2, 0), 1, 0.0) == []
    assert heard(awaited, numbers(2, 2, 0), 1, 0.9 * ON_ITS_WAY_S) == []
    assert heard(awaited, numbers(3, 2, 0), 1, 1.0 * ON_ITS_WAY_S) == []
    assert heard(awaited, numbers(3, 2, 0), 1, 2.0 * ON_ITS_WAY_S) == []
    assert heard(awaited, numbers(3, 3, 0), 1, 3.0 * ON_ITS_WAY_S) == [b"ticket.."]


def test_who_comes_behind_is_not_waited_for() -> None:
    """Only those that had come when the request surely had."""
    awaited = Awaited()
    assert heard(awaited, numbers(0, 0, 0), 1, 0.0) == []
    assert heard(awaited, numbers(1, 0, 0), 1, 1.0) == [], "due at the first"
    assert heard(awaited, numbers(5, 0, 0), 5, 2.0) == []
    assert heard(awaited, numbers(5, 1, 0), 5, 3.0) == [b"ticket.."]


def test_an_engine_that_started_anew_counts_anew() -> None:
    """What an earlier process had given says nothing about this one."""
    awaited = Awaited()
    assert heard(awaited, numbers(1, 6, 5), 1, 0.0) == []
    assert heard(awaited, numbers(2, 6, 5), 1, 1.0) == [], "due at the seventh"
    assert heard(awaited, numbers(9, 0, 0), 1, 2.0) == [], "due at the ninth"
    assert heard(awaited, numbers(9, 8, 0), 1, 3.0) == []
    assert heard(awaited, numbers(9, 9, 0), 1, 4.0) == [b"ticket.."]


def test_without_counts_nothing_is_told() -> None:
    """An engine of another make: the answer's end tells."""
    awaited = Awaited()
    silent = EngineSample(counters=numbers(0, 0, 0).counters, sleep_level=None)
    for now_s in range(4):
        assert heard(awaited, silent, 1, float(now_s)) == []
