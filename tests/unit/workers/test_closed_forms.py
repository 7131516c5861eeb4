"""Both simulated engines against closed forms: one request alone, a full batch, an M/D/1 queue."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from workers.simulated.cost_model import CostModel, load_profile, profile_names
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest
from workers.simulated.request import Request, pack_tokens

BLOCK_SIZE = 16
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Equal requests with nothing in common, and when each arrives, rising."""

    arrivals_s: Sequence[float]
    prompt_tokens: int
    output_tokens: int

    @property
    def blocks_each(self) -> int:
        """Full blocks a request ends with."""
        return (self.prompt_tokens + self.output_tokens - 1) // BLOCK_SIZE


@dataclass(frozen=True, kw_only=True)
class Seen:
    """When each request had its first token and its last."""

    first_s: Times
    last_s: Times


def make_config(cost: CostModel, load: Load, *, max_num_seqs: int) -> EngineConfig:
    """An engine whose batch takes so many whole prompts in one step."""
    return EngineConfig(
        cost=cost,
        block_size_tokens=BLOCK_SIZE,
        capacity_blocks=(load.blocks_each + 1) * max_num_seqs,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * load.prompt_tokens,
        output_ids=range(10),
    )


def slow(config: EngineConfig, load: Load) -> Seen:
    """Step by step, idle until the next arrival where there is nothing to do."""
    engine = Engine(config)
    first_s, last_s = (np.full(len(load.arrivals_s), math.nan) for _ in range(2))
    now_s, arrived = 0.0, 0
    while True:
        while arrived < len(load.arrivals_s) and load.arrivals_s[arrived] <= now_s:
            prompt = range(arrived * load.prompt_tokens, (arrived + 1) * load.prompt_tokens)
            engine.add(
                Request(
                    request_id=str(arrived),
                    packed_prompt=pack_tokens(prompt),
                    output_tokens=load.output_tokens,
                )
            )
            arrived += 1
        step = engine.start_step()
        if step is None:
            if arrived == len(load.arrivals_s):
                return Seen(first_s=first_s, last_s=last_s)
            now_s = load.arrivals_s[arrived]
            continue
        now_s += step.duration_s
        for request, position, last in engine.finish_step(step).tokens:
            if not position:
                first_s[int(request.request_id)] = now_s
            if last:
                last_s[int(request.request_id)] = now_s


def fast(config: EngineConfig, load: Load) -> Seen:
    """In spans; who comes at the end of a step joins the next one."""
    engine = SpanEngine(config)
    first_s, last_s = (np.full(len(load.arrivals_s), math.nan) for _ in range(2))
    requests = chains(load)
    arrivals = iter(load.arrivals_s)
    due_s = next(arrivals, math.inf)
    while due_s < math.inf or engine.ends_s is not None:
        ends_s = engine.ends_s
        now_s = due_s if ends_s is None else min(due_s, ends_s)
        if now_s == ends_s:
            for request, first, last in engine.finish():
                if first:
                    first_s[int(request.request_id)] = now_s
                if last:
                    last_s[int(request.request_id)] = now_s
        while due_s == now_s:
            engine.add(next(requests), now_s)
            due_s = next(arrivals, math.inf)
        if engine.ends_s is None:
            engine.start(now_s)
    return Seen(first_s=first_s, last_s=last_s)


def chains(load: Load) -> Iterator[ChainRequest]:
    """The requests as the fast engine takes them."""
    for number in range(len(load.arrivals_s)):
        start = number * load.blocks_each
        yield ChainRequest(
            request_id=str(number),
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            blocks=np.arange(start, start + load.blocks_each),
        )


def step_times_s(cost: CostModel, *, batch: int, prompt: int, output: int) -> Iterator[float]:
    """Of requests alike that begin together: the prefill of all, then each step of decoding."""
    tokens = batch * prompt
    touched = 1.0 - (1.0 - cost.expert_share) ** tokens
    linear_s = max(tokens * cost.linear_s_per_token, cost.weights_s + cost.experts_s * touched)
    pairs = batch * prompt * (prompt + 1) / 2
    yield cost.step_overhead_s + linear_s + pairs * cost.attention_s_per_pair
    touched = 1.0 - (1.0 - cost.expert_share) ** batch
    linear_s = max(batch * cost.linear_s_per_token, cost.weights_s + cost.experts_s * touched)
    for decoded in range(1, output):
        read_s = batch * (prompt + decoded) * cost.kv_read_s_per_token
        yield cost.step_overhead_s + linear_s + read_s


@pytest.mark.parametrize("engine", [slow, fast])
@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("prompt", [1, 16, 500, 4096, 30_000])
def test_a_lone_request_takes_what_the_formula_says(
    name: str, prompt: int, engine: Callable[[EngineConfig, Load], Seen]
) -> None:
    """TTFT is the prefill step and TPOT the mean decode step, to the last digit."""
    cost = load_profile(name).cost
    load = Load(arrivals_s=[0.0], prompt_tokens=prompt, output_tokens=200)
    seen = engine(make_config(cost, load, max_num_seqs=1), load)
    ttft_s, *steps_s = step_times_s(cost, batch=1, prompt=prompt, output=200)
    end_s = ttft_s
    for step_s in steps_s:
        end_s += step_s
    assert (seen.first_s[0], seen.last_s[0]) == (ttft_s, end_s)
    tpot_s = (seen.last_s[0] - seen.first_s[0]) / 199
    mean_context = prompt + 100  # of prompt + 1 .. prompt + 199 tokens
    base_s = steps_s[0] - (prompt + 1) * cost.kv_read_s_per_token
    assert tpot_s == pytest.approx(base_s + mean_context * cost.kv_read_s_per_token, rel=1e-12)


@pytest.mark.parametrize("engine", [slow, fast])
@pytest.mark.parametrize("name", profile_names())
def test_a_long_prompt_takes_the_sum_of_its_chunks(
    name: str, engine: Callable[[EngineConfig, Load], Seen]
) -> None:
    """Each chunk of the token budget is a step that attends to itself and to all before it."""
    cost = load_profile(name).cost
    load = Load(arrivals_s=[0.0], prompt_tokens=30_000, output_tokens=1)
    config = replace(make_config(cost, load, max_num_seqs=1), max_num_batched_tokens=8192)
    ttft_s = 0.0
    for start, tokens in ((0, 8192), (8192, 8192), (16_384, 8192), (24_576, 5424)):
        touched = 1.0 - (1.0 - cost.expert_share) ** tokens
        linear_s = max(tokens * cost.linear_s_per_token, cost.weights_s + cost.experts_s * touched)
        pairs = tokens * (start + (tokens + 1) / 2)
        ttft_s += cost.step_overhead_s + linear_s + pairs * cost.attention_s_per_pair
    assert engine(config, load).first_s[0] == ttft_s


@pytest.mark.parametrize("engine", [slow, fast])
@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_saturated_engine_gives_batch_over_step_time(
    name: str, batch: int, engine: Callable[[EngineConfig, Load], Seen]
) -> None:
    """With three times the requests it can run, its batch is full in every step to the end."""
    cost = load_profile(name).cost
    waves, prompt, output = 3, 64, 40
    load = Load(arrivals_s=[0.0] * waves * batch, prompt_tokens=prompt, output_tokens=output)
    seen = engine(make_config(cost, load, max_num_seqs=batch), load)
    wave_s = sum(step_times_s(cost, batch=batch, prompt=prompt, output=output))
    throughput = waves * batch * output / seen.last_s.max()
    assert throughput == pytest.approx(batch * output / wave_s, rel=1e-12)
    ends_s = np.repeat(np.arange(1, waves + 1) * wave_s, batch)
    assert seen.last_s == pytest.approx(ends_s, rel=1e-12)


COST = load_profile("h20-qwen3-30b-a3b").cost
PROMPT = 24


def service_s(output_tokens: int) -> float:
    """The time that an engine which runs one request at a time takes for it."""
    return sum(step_times_s(COST, batch=1, prompt=PROMPT, output=output_tokens))


def queue(
    engine: Callable[[EngineConfig, Load], Seen], arrivals_s: Times, output_tokens: int
) -> Times:
    """Waits before service of customers of an M/D/1 queue: one engine with a batch of one."""
    load = Load(arrivals_s=arrivals_s.tolist(), prompt_tokens=PROMPT, output_tokens=output_tokens)
    ends_s = engine(make_config(COST, load, max_num_seqs=1), load).last_s
    waits_s: Times = ends_s - arrivals_s - service_s(output_tokens)
    return waits_s


@pytest.mark.parametrize("engine", [slow, fast])
def test_a_queue_obeys_lindley(engine: Callable[[EngineConfig, Load], Seen]) -> None:
    """Each wait is the one before, plus a service, less the gap between arrivals; never below 0."""
    served_s = service_s(4)
    arrivals_s = np.cumsum(np.random.default_rng(1).exponential(served_s / 0.8, 500))
    expected = [0.0]
    for gap_s in np.diff(arrivals_s):
        expected.append(max(0.0, expected[-1] + served_s - gap_s))
    assert queue(engine, arrivals_s, 4).tolist() == pytest.approx(expected, abs=1e-9)
    assert max(expected) > 4 * served_s


@pytest.mark.parametrize(("rho", "engine"), [(0.3, slow), (0.6, fast), (0.8, slow)])
def test_mean_wait_of_an_md1_queue(
    rho: float, engine: Callable[[EngineConfig, Load], Seen]
) -> None:
    """It is rho / (2 mu (1 - rho)), by Pollaczek and Khinchine, within a 99 % interval.

    The interval is Student's t over 8 pairs of runs of 1,000 customers, the first tenth of each
    left out; the second run of a pair has the gaps of the first one mirrored, which narrows it. It
    is within 10 % of the mean, so a wait further off would be seen.
    """
    pairs, customers, t_of_7 = 8, 1000, 3.499
    served_s = service_s(1)
    means = []
    for seed in range(pairs):
        drawn = np.random.default_rng(seed).random(customers)
        waits_s = [
            queue(engine, np.cumsum(-np.log(uniform) * served_s / rho), 1)[customers // 10 :]
            for uniform in (drawn, 1 - drawn)
        ]
        means.append(np.mean(waits_s))
    half_width_s = t_of_7 * np.std(means, ddof=1) / math.sqrt(pairs)
    theory_s = rho * served_s / (2 * (1 - rho))
    assert half_width_s < 0.10 * theory_s
    assert np.mean(means) == pytest.approx(theory_s, abs=half_width_s)
