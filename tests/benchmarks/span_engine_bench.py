"""How fast the fast engine plays a trace, and whether the step-by-step one agrees.

    python tests/benchmarks/span_engine_bench.py TRACE [--requests N] [--engines N] [--speed X]

Requests go round robin. Prints CPU per request, without reading the trace; with --looks true each
arrival also brings an index of all engines' blocks up to date and asks it for the prompt; with
--check N the step-by-step engine plays the first N requests too, and both must give the same times.
"""

import argparse
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from loadgen.arrivals import replay
from loadgen.simulation.chain_holders import ChainHolders
from loadgen.simulation.chains import chain_requests
from loadgen.simulation.span_driver import SpanDriver
from loadgen.slicing import spread_equal_arrivals
from loadgen.trace import read_trace
from workers.simulated.cost_model import load_profile
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest
from workers.simulated.fast.span import ChainAdmission, Reached
from workers.simulated.request import Request
from workers.simulated.step import Step

BLOCK_SIZE_TOKENS = 16
HOUR_REQUESTS = 12_000
EVENTS_DELAY_S = 0.02


@dataclass
class Played:
    """What came out, by request id: hit tokens, first and last token's times."""

    hits: dict[str, int] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    events: int = 0
    cpu_s: float = 0.0


class Loop:
    """A heap of what is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Have it done then."""
        heapq.heappush(self._due, (when_s, next(self._order), action))

    def run(self) -> None:
        """Until nothing is due."""
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            self.events += 1
            action()


def config_of(profile_name: str) -> EngineConfig:
    """The lab's engine."""
    profile = load_profile(profile_name)
    return EngineConfig(
        cost=profile.cost,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        capacity_blocks=profile.capacity_tokens // BLOCK_SIZE_TOKENS,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        output_ids=(0,),
    )


def play_fast(
    config: EngineConfig,
    requests: Sequence[ChainRequest],
    at_s: Sequence[float],
    engines: int,
    *,
    looks: bool = False,
) -> Played:
    """The fast engines."""
    loop, played = Loop(), Played()

    def admitted(admissions: Sequence[ChainAdmission], _: float) -> None:
        for request, hit_tokens, _ in admissions:
            played.hits[request.request_id] = hit_tokens

    def reached(those: Sequence[Reached], now_s: float) -> None:
        for request, first, last in those:
            if first:
                played.first_s[request.request_id] = now_s
            if last:
                played.ended_s[request.request_id] = now_s

    began_s = time.process_time()
    drivers = [
        SpanDriver(SpanEngine(config), loop.at, admitted=admitted, reached=reached)
        for _ in range(engines)
    ]

    identities_count = 1 + max(int(request.blocks.max(initial=0)) for request in requests)
    for driver in drivers:
        driver.engine.pool.learn(identities_count)
    holders = ChainHolders(engines, identities_count)

    def look(blocks: Identities) -> None:
        for slot, driver in enumerate(drivers):
            holders.apply(slot, driver.engine.changes(loop.now_s - EVENTS_DELAY_S))
        holders.depths(blocks)

    def arrive(index: int) -> None:
        if looks:
            look(requests[index].blocks)
        driver = drivers[index % engines]
        driver.add(requests[index], loop.now_s)
        if not looks:
            driver.engine.changes(loop.now_s)
        if index + 1 < len(requests):
            loop.at(at_s[index + 1], partial(arrive, index + 1))

    loop.at(at_s[0], partial(arrive, 0))
    loop.run()
    played.cpu_s = time.process_time() - began_s
    played.events = loop.events
    played.preemptions = sum(driver.engine.totals.preemption_count for driver in drivers)
    return played


def play_slow(
    config: EngineConfig, requests: Sequence[ChainRequest], at_s: Sequence[float], engines: int
) -> Played:
    """The step-by-step engines, on tokens made of the identities."""
    loop, played = Loop(), Played()
    slots = [Engine(config) for _ in range(engines)]
    stepping = [False] * engines

    def start(slot: int) -> None:
        step = None if stepping[slot] else slots[slot].start_step()
        if step is None:
            return
        stepping[slot] = True
        for request, hit_tokens, _ in step.admissions:
            played.hits[request.request_id] = hit_tokens
        loop.at(loop.now_s + step.duration_s, partial(finish, slot, step))

    def finish(slot: int, step: Step) -> None:
        stepping[slot] = False
        for request, position, last in slots[slot].finish_step(step).tokens:
            if not position:
                played.first_s[request.request_id] = loop.now_s
            if last:
                played.ended_s[request.request_id] = loop.now_s
        start(slot)

    def arrive(index: int) -> None:
        request = requests[index]
        blocks = -(-request.prompt_tokens // BLOCK_SIZE_TOKENS)
        names = np.append(request.blocks[:blocks], [1 << 30])[:blocks].astype(np.uint32)
        packed = np.repeat(names, BLOCK_SIZE_TOKENS)[: request.prompt_tokens].tobytes()
        slots[index % engines].add(
            Request(
                request_id=request.request_id,
                packed_prompt=packed,
                output_tokens=request.output_tokens,
                seed=index,
            )
        )
        start(index % engines)
        if index + 1 < len(requests):
            loop.at(at_s[index + 1], partial(arrive, index + 1))

    began_s = time.process_time()
    loop.at(at_s[0], partial(arrive, 0))
    loop.run()
    played.cpu_s = time.process_time() - began_s
    played.events = loop.events
    played.preemptions = sum(engine.totals.preemption_count for engine in slots)
    return played


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=HOUR_REQUESTS)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so many times faster")
    parser.add_argument("--profile", default="h20-qwen3-30b-a3b")
    parser.add_argument("--check", type=int, default=0, help="requests for the other engine, too")
    parser.add_argument("--looks", default="false", choices=["true", "false"])
    options = parser.parse_args()
    rows = spread_equal_arrivals(read_trace(options.trace).rows[: options.requests], seed=0)
    at_s = [when_s / options.speed for when_s in replay([row.arrival_s for row in rows])]
    config = config_of(options.profile)
    began_s = time.process_time()
    requests = chain_requests(rows, block_size_tokens=BLOCK_SIZE_TOKENS)
    print(f"{len(rows)} requests over {at_s[-1]:.0f} s on {options.engines} engines")
    print(f"prepared in {(time.process_time() - began_s) / len(rows) * 1e6:.0f} us a request")
    looks = options.looks == "true"
    fast = play_fast(config, requests, at_s, options.engines, looks=looks)
    tell("fast", fast, requests, at_s)
    if options.check:
        few, times = requests[: options.check], at_s[: options.check]
        fast = play_fast(config, few, times, options.engines)
        slow = play_slow(config, few, times, options.engines)
        tell("fast", fast, few, times)
        tell("slow", slow, few, times)
        assert fast.hits == slow.hits
        assert fast.first_s == slow.first_s
        assert fast.ended_s == slow.ended_s
        assert fast.preemptions == slow.preemptions
        print("the same hits, first and last tokens, to the last bit")


def tell(
    name: str, played: Played, requests: Sequence[ChainRequest], at_s: Sequence[float]
) -> None:
    """One line."""
    count = len(requests)
    ttft_s = np.array([played.first_s[r.request_id] for r in requests]) - np.array(at_s)
    hit_ratio = sum(played.hits.values()) / sum(r.prompt_tokens for r in requests)
    print(
        f"{name}: {played.cpu_s / count * 1e6:.0f} us a request, {played.events / count:.1f} events"
        f" a request, {HOUR_REQUESTS} requests in {played.cpu_s / count * HOUR_REQUESTS:.1f} s;"
        f" TTFT mean {ttft_s.mean():.3f} s, hit ratio {hit_ratio:.3f},"
        f" {played.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
