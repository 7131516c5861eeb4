"""Laws of the simulated engine under random schedules."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.request import Request, pack_tokens
from workers.simulated.step import Token

BLOCK_SIZE = 4
STEPS_MAX = 5_000

COST = CostModel(
    step_overhead_s=1e-3,
    linear_s_per_token=1e-5,
    weights_s=1e-3,
    experts_s=1e-3,
    expert_share=0.1,
    attention_s_per_pair=1e-8,
    kv_read_s_per_token=1e-8,
)

# Few distinct tokens, so that prompts share prefixes often.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)
arrivals = st.tuples(st.just("add"), prompts, st.integers(1, 12), st.sampled_from([None, "s"]))
actions = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("reset")),
    ),
    max_size=60,
)
limits = st.fixed_dictionaries(
    {
        "capacity_blocks": st.integers(11, 30),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
    }
)


@dataclass
class Run:
    """An engine under a schedule, with everything it said."""

    engine: Engine
    events: list[KvEvent] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    added: int = 0
    aborted: int = 0

    def act(self, action: tuple) -> None:
        """Perform one action of a schedule."""
        match action:
            case ("add", prompt, output_tokens, salt):
                packed = pack_tokens(prompt)
                self.engine.add(
                    Request(
                        request_id=str(self.added),
                        packed_prompt=packed,
                        output_tokens=output_tokens,
                        salt=salt,
                        seed=len(prompt),
                    )
                )
                self.added += 1
            case ("step",):
                self.step()
            case ("abort", number):
                self.aborted += self.engine.abort(str(number))
            case ("reset",):
                self.engine.reset_prefix_cache()

    def step(self) -> bool:
        """One step, if there is one."""
        started = self.engine.start_step()
        if started is None:
            return False
        output = self.engine.finish_step(started)
        self.durations_s.append(started.duration_s)
        self.events += output.events
        self.tokens += output.tokens
        return True


def make_run(limits: dict[str, int]) -> Run:
    """A fresh engine."""
    config = EngineConfig(cost=COST, block_size_tokens=BLOCK_SIZE, output_ids=range(2), **limits)
    return Run(Engine(config))


def resident(engine: Engine) -> Counter[int]:
    """Hashes in the pool, with the number of blocks that hold each."""
    return Counter(h for h in engine.pool._hash_of if h is not None)


def replayed(events: list[KvEvent]) -> Counter[int]:
    """What a naive client believes after these events."""
    believed: Counter[int] = Counter()
    for event in events:
        match event:
            case BlocksStored():
                believed.update(event.block_hashes)
            case BlocksRemoved():
                believed.subtract(event.block_hashes)
            case BlocksCleared():
                believed.clear()
    assert all(count >= 0 for count in believed.values()), "removed what was never stored"
    return +believed


def check_pool(engine: Engine) -> None:
    """Every block is free or used, never both, and references are those of the running requests."""
    pool = engine.pool
    held = Counter(b for active in engine._running for b in active.block_ids)
    free = set(pool.order._queue)
    assert [held[b] for b in range(pool.capacity_blocks)] == pool._references
    assert free == {b for b in range(pool.capacity_blocks) if not held[b]}
    assert pool.free_count + pool.used_count == pool.capacity_blocks
    known = dict.fromkeys(pool._first.values())
    copies = [b for blocks in pool._copies.values() for b in blocks]
    assert Counter([*known, *copies]) == Counter(
        b for b, h in enumerate(pool._hash_of) if h is not None
    )


@given(limits, actions)
def test_pool_invariants_hold_after_every_action(limits: dict[str, int], actions: list) -> None:
    """Reference counts, free list and hash table agree at all times."""
    run = make_run(limits)
    for action in actions:
        run.act(action)
        check_pool(run.engine)


@given(limits, actions)
def test_events_replayed_equal_the_resident_blocks(limits: dict[str, int], actions: list) -> None:
    """A client that counts stored and removed knows the pool's content, duplicates included."""
    run = make_run(limits)
    for action in actions:
        run.act(action)
    # What happened since the last step is announced with the next one.
    assert resident(run.engine) == replayed(run.events + run.engine.pool.events)


@given(limits, actions)
def test_every_request_finishes_or_was_aborted(limits: dict[str, int], actions: list) -> None:
    """Preemption and full pools delay requests and never lose them."""
    run = make_run(limits)
    for action in actions:
        run.act(action)
    steps = 0
    while run.step():
        steps += 1
        assert steps < STEPS_MAX, "no progress"
    finished = sum(token.last for token in run.tokens)
    assert (run.added, 0) == (finished + run.aborted, run.engine.pool.used_count)


@given(limits, actions)
def test_tokens_of_a_request_come_in_order_and_in_number(
    limits: dict[str, int], actions: list
) -> None:
    """Positions count from 0 without gaps; `last` stands at the requested length exactly."""
    run = make_run(limits)
    for action in actions:
        run.act(action)
    seen: dict[str, int] = {}
    for request, position, last in run.tokens:
        assert position == seen.get(request.request_id, 0)
        assert last == (position + 1 == request.output_tokens)
        seen[request.request_id] = position + 1


@given(limits, actions)
def test_same_schedule_same_outcome(limits: dict[str, int], actions: list) -> None:
    """No clock, no randomness: two engines under one schedule say the same."""
    runs = [make_run(limits), make_run(limits)]
    for run in runs:
        for action in actions:
            run.act(action)
    first, second = runs
    assert (first.events, first.tokens, first.durations_s) == (
        second.events,
        second.tokens,
        second.durations_s,
    )


@given(prompts, prompts)
def test_hit_is_the_shared_prefix_under_the_last_token_rule(
    first: list[int], second: list[int]
) -> None:
    """A request hits the shared full blocks of an earlier one, short of its own last token."""
    run = make_run({"capacity_blocks": 30, "max_num_seqs": 2, "max_num_batched_tokens": 100})
    run.act(("add", first, 1, None))
    run.step()
    run.act(("add", second, 1, None))
    started = run.engine.start_step()
    assert started is not None
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += 1
    expected = min(shared, len(second) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert expected == started.admissions[0].hit_tokens


@given(limits, actions)
def test_step_is_within_its_budget(limits: dict[str, int], actions: list) -> None:
    """No step exceeds the token budget or the sequence limit."""
    run = make_run(limits)
    for action in actions:
        if action != ("step",):
            run.act(action)
            continue
        started = run.engine.start_step()
        if started is not None:
            assert sum(count for _, count in started.batch) <= limits["max_num_batched_tokens"]
            assert len(started.batch) <= limits["max_num_seqs"]
            run.engine.finish_step(started)
