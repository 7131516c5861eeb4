"""What a streamed chunk costs a proxy: CPU in the middle of streams, for proxy_bench.py.

Every target in turn holds so many streams that get an event each tick, and its CPU is read over a
window in which no stream begins or ends, less what it uses while idle, over the events that have
come through. All targets are measured in rounds, one behind the other, so that a machine that
becomes slower meanwhile is slower for all; the figure is the median of the rounds, its spread the
largest less the smallest.

Ticks are those of an engine that so many streams keep busy, and leave every proxy room on its core
(512 streams with a tick of 20 ms would need more than one): a proxy that falls behind reads several
events at once, and a chunk seems cheaper than it is.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from proxy_load import chats, opened
from proxy_targets import Target

TICK_S = {1: 0.005, 64: 0.02, 512: 0.05}
SETTLE_S = 0.5
PROMPT_TOKENS = 64
IN_TIME_RATIO_MIN = 0.95


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long it takes: rounds, and seconds of each window."""

    rounds: int
    window_s: float
    idle_s: float


FULL = Plan(rounds=3, window_s=4.0, idle_s=0.8)
QUICK = Plan(rounds=2, window_s=1.5, idle_s=0.6)


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What one target takes at so many streams.

    Attributes:
        chunk_s: CPU of one event, median of the rounds.
        spread_s: largest less smallest of the rounds.
        idle_ratio: CPU a second without any load.
        helpers_idle_ratio: the same of its helpers.
        in_time_ratio: events that came, of those the ticks promise, in the worst round.
    """

    chunk_s: float
    spread_s: float
    idle_ratio: float
    helpers_idle_ratio: float
    in_time_ratio: float


async def steady(
    targets: Sequence[Target],
    streams: int,
    plan: Plan,
    seed: int,
    tick: Callable[[float], Awaitable[None]],
) -> list[Steady]:
    """Measure all targets in alternating rounds.

    Args:
        targets: that run.
        streams: open through one at a time, a key of TICK_S.
        plan: rounds and windows.
        seed: of the prompts; as many more of them are used as there are rounds.
        tick: tells the engines.

    Returns:
        In the order of the targets.
    """
    await tick(TICK_S[streams])
    events = round((plan.window_s + 30.0) / TICK_S[streams])  # more than are waited for
    rounds: list[list[Steady]] = [[] for _ in targets]
    for number in range(plan.rounds):
        some = chats(streams, prompt_tokens=PROMPT_TOKENS, turns=1, seed=seed + number)
        bodies = [one.body(0, events) for one in some]
        for target, measured in zip(targets, rounds, strict=True):
            measured.append(await _window(target, bodies, TICK_S[streams], plan))
    return [
        Steady(
            chunk_s=statistics.median(one.chunk_s for one in measured),
            spread_s=max(one.chunk_s for one in measured) - min(one.chunk_s for one in measured),
            idle_ratio=statistics.median(one.idle_ratio for one in measured),
            helpers_idle_ratio=statistics.median(one.helpers_idle_ratio for one in measured),
            in_time_ratio=min(one.in_time_ratio for one in measured),
        )
        for measured in rounds
    ]


async def _window(target: Target, bodies: Sequence[bytes], tick_s: float, plan: Plan) -> Steady:
    """One round of one target."""
    await asyncio.sleep(SETTLE_S)  # what came before has ended
    helpers_before_s = target.helpers_cpu_s()
    idle_ratio, idle_s = await _cpu_ratio(target, plan.idle_s)
    helpers_idle_ratio = (target.helpers_cpu_s() - helpers_before_s) / idle_s
    async with opened(target.url, bodies) as samples:
        await asyncio.sleep(SETTLE_S)
        before = samples.events
        busy_ratio, took_s = await _cpu_ratio(target, plan.window_s)
        count = samples.events - before
    in_time_ratio = count * tick_s / (len(bodies) * took_s)
    if in_time_ratio < IN_TIME_RATIO_MIN or samples.errors:
        print(
            f"{target.target} {target.policy}, {len(bodies)} streams: {in_time_ratio:.0%} of the "
            f"events came in time, {samples.errors} errors {samples.problem!r}",
            file=sys.stderr,
        )
    return Steady(
        chunk_s=(busy_ratio - idle_ratio) * took_s / max(count, 1),
        spread_s=0.0,
        idle_ratio=idle_ratio,
        helpers_idle_ratio=helpers_idle_ratio,
        in_time_ratio=in_time_ratio,
    )


async def _cpu_ratio(target: Target, window_s: float) -> tuple[float, float]:
    """CPU of a target over a window, and how long it was."""
    before_s, begun_s = target.cpu_s(), time.perf_counter()
    await asyncio.sleep(window_s)
    took_s = time.perf_counter() - begun_s
    return (target.cpu_s() - before_s) / took_s, took_s
