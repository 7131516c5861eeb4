"""Limits of API keys on a real server: never more than was allowed, whoever asks."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from contract.embedded_server import EmbeddedServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.contract import functions, keys, quota
from indexer.contract.call import Call
from indexer.contract.limits import QUOTA_DEBT_MAX_S, QUOTA_LEASE_S
from indexer.contract.link import connected
from indexer.contract.quota import UNLIMITED, Pace, QuotaReply, Verdict
from router.door.local_quota import LocalQuota, pace_of
from router.door.visitor import KeyLimits, Rate

SLOW = Rate(per_minute=1, burst=10)
"""Of which nothing comes back while a test runs."""


@pytest.fixture(autouse=True)
def _emptied(server: EmbeddedServer) -> None:
    server.redis.flushdb()


def take(
    server: EmbeddedServer,
    limits: KeyLimits,
    *,
    router: str = "a",
    in_flight: int = 1,
    tokens_count: int = 0,
) -> QuotaReply:
    """Ask for one request of the key `k`."""
    return quota.take_reply(server.call(taken(limits, router, in_flight, tokens_count)))


def taken(limits: KeyLimits, router: str, in_flight: int, tokens_count: int) -> Call:
    """The call that asks."""
    return quota.take(
        "k",
        router,
        in_flight=in_flight,
        concurrent_max=limits.concurrent_requests_max,
        requests=pace_of(limits.requests),
        tokens=pace_of(limits.tokens),
        tokens_count=tokens_count,
    )


def settle(server: EmbeddedServer, tokens: Pace, tokens_count: int, in_flight: int = 0) -> None:
    """Tell what a request of router `a` has cost."""
    call = quota.settle("k", "a", in_flight=in_flight, tokens=tokens, tokens_count=tokens_count)
    assert server.call(call) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.booleans()), max_size=25),
    st.sampled_from([None, 1, 2]),
)
def test_the_server_and_the_router_reckon_alike(
    server: EmbeddedServer, asked: list[tuple[int, int, bool]], most: int | None
) -> None:
    """The functions and their twin, for one router: same verdicts, and refusals cost nothing."""
    server.redis.flushdb()
    limits = KeyLimits(
        requests=Rate(per_minute=1, burst=3), tokens=SLOW, concurrent_requests_max=most
    )
    local, now_us = LocalQuota(), time.monotonic() * 1e6
    for in_flight, tokens_count, is_output in asked:
        if is_output:
            settle(server, pace_of(SLOW), tokens_count)
            local.settle(limits, now_us=now_us, tokens_count=tokens_count, routers=1)
            continue
        told = take(server, limits, in_flight=in_flight, tokens_count=tokens_count)
        twin = local.take(
            limits, now_us=now_us, in_flight=in_flight, tokens_count=tokens_count, routers=1
        )
        assert told.verdict == twin.verdict
        assert told.wait_s == pytest.approx(twin.wait_s, abs=5.0)


async def test_no_window_has_more_than_the_limit_and_the_burst(redis_socket: Path) -> None:
    """However many routers ask at once, and as fast as they can."""
    rate = Rate(per_minute=60_000, burst=20)
    asked_s: list[tuple[float, float]] = []

    async def ask(router: str) -> None:
        async with connected(f"unix://{redis_socket}", deadline_s=5.0) as link:
            ends_s = time.monotonic() + 0.3
            while (begun_s := time.monotonic()) < ends_s:
                reply = await functions.run(link, taken(KeyLimits(requests=rate), router, 1, 0))
                if quota.take_reply(reply).verdict is Verdict.ADMITTED:
                    asked_s.append((begun_s, time.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        for router in "abc":
            tasks.create_task(ask(router))
    begun_s, ended_s = np.array(asked_s).T
    for first_s in begun_s:  # each admission lies between its question and its answer
        within = np.sort(ended_s[begun_s >= first_s])
        allowed = rate.burst + (within - first_s) * rate.per_minute / 60
        assert (np.arange(1, len(within) + 1) <= allowed + 1e-6).all()
    assert len(asked_s) > 2 * rate.burst


def test_requests_in_flight_are_those_of_all_living_routers(server: EmbeddedServer) -> None:
    """A router tells its own number; one that is silent for a lease counts no more."""
    limits = KeyLimits(concurrent_requests_max=3)
    assert take(server, limits, router="a", in_flight=2).verdict is Verdict.ADMITTED
    assert take(server, limits, router="b", in_flight=1).routers_count == 2
    assert take(server, limits, router="b", in_flight=2).verdict is Verdict.CONCURRENT
    settle(server, UNLIMITED, 0, in_flight=1)
    assert take(server, limits, router="b", in_flight=2).verdict is Verdict.ADMITTED
    server.redis.hset(keys.quota("k"), "c:a", f"9 {round(time.time() * 1e6) - 1}")
    reply = take(server, limits, router="b", in_flight=3)
    assert (reply.verdict, reply.routers_count) == (Verdict.ADMITTED, 1)
    assert not server.redis.hexists(keys.quota("k"), "c:a")


def test_more_tokens_than_the_burst_are_never_admitted(server: EmbeddedServer) -> None:
    """However long one waits, so no time is named."""
    reply = take(server, KeyLimits(tokens=SLOW), tokens_count=11)
    assert (reply.verdict, reply.wait_s, reply.tokens_left) == (Verdict.NEVER, 0.0, 10)


def test_outputs_are_paid_for_before_the_next_prompt(server: EmbeddedServer) -> None:
    """They are known afterwards, so they may go beyond the burst; the debt has a bound."""
    limits = KeyLimits(tokens=Rate(per_minute=600, burst=10))
    settle(server, pace_of(limits.tokens), 40)
    reply = take(server, limits, tokens_count=1)
    assert (reply.verdict, reply.tokens_left) == (Verdict.TOKENS, 0)
    assert reply.wait_s == pytest.approx(3.1, abs=0.5)
    settle(server, pace_of(limits.tokens), 10**9)
    assert take(server, limits, tokens_count=0).wait_s <= QUOTA_DEBT_MAX_S


def test_a_clock_that_went_back_locks_nobody_out(server: EmbeddedServer) -> None:
    """What was to be paid for in a year is taken for the longest debt."""
    server.redis.hset(keys.quota("k"), "r", round((time.time() + 3e7) * 1e6))
    reply = take(server, KeyLimits(requests=SLOW))
    assert reply.wait_s <= QUOTA_DEBT_MAX_S + 60


def test_what_was_not_written_here_is_put_right(server: EmbeddedServer) -> None:
    """Another type, or fields that are no numbers."""
    limits = KeyLimits(requests=SLOW, concurrent_requests_max=1)
    server.redis.set(keys.quota("k"), "x")
    assert take(server, limits).verdict is Verdict.ADMITTED
    server.redis.hset(keys.quota("k"), mapping={"r": "x", "c:b": "y", "z": ""})
    assert take(server, limits).verdict is Verdict.ADMITTED


def test_it_expires_when_it_says_nothing_more(server: EmbeddedServer) -> None:
    """With the lease of a router, or when all has been paid for."""
    take(server, KeyLimits(concurrent_requests_max=3))
    assert 0 < server.redis.pttl(keys.quota("k")) <= QUOTA_LEASE_S * 1000
    take(server, KeyLimits(requests=SLOW))
    assert QUOTA_LEASE_S * 1000 < server.redis.pttl(keys.quota("k")) <= 60_000
