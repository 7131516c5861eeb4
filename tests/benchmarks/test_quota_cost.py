"""What the limits of API keys cost one Redis core: it runs one function at a time."""

from pathlib import Path
from typing import Any

import pytest
import redis
from contract.embedded_server import EmbeddedServer

from indexer.contract import keys, quota
from indexer.contract.call import Call
from indexer.contract.quota import Pace

pytestmark = pytest.mark.benchmark

ROUTERS = 16
CALLS = 500
PACE = Pace.of(per_minute=6_000_000, burst=6_000_000)


def take(router: int, concurrent_max: int | None = None) -> Call:
    """One request of a key with limits of requests and tokens."""
    return quota.take(
        "k",
        f"router-{router}",
        in_flight=3,
        concurrent_max=concurrent_max,
        requests=PACE,
        tokens=PACE,
        tokens_count=1000,
    )


def take_counting(router: int) -> Call:
    """Also with one of requests in flight, for which those of all routers are added up."""
    return take(router, concurrent_max=1000)


def settle(router: int) -> Call:
    """The end of one."""
    return quota.settle("k", f"router-{router}", in_flight=2, tokens=PACE, tokens_count=100)


@pytest.mark.parametrize("made", [take, take_counting, settle])
def test_quota_functions(redis_socket: Path, benchmark: Any, made: Any) -> None:
    """500 calls of 16 routers for one key, in one round trip."""
    server = EmbeddedServer(redis_socket)
    server.load()
    server.redis.delete(keys.quota("k"))

    def round_trip() -> None:
        pipe: redis.client.Pipeline = server.redis.pipeline(transaction=False)
        for number in range(CALLS):
            pipe.execute_command(*made(number % ROUTERS).command())
        pipe.execute()

    server.redis.config_resetstat()
    benchmark.pedantic(round_trip, rounds=5, warmup_rounds=1)
    stats = server.redis.info("commandstats")["cmdstat_fcall"]
    benchmark.extra_info["server_us_per_call"] = stats["usec_per_call"]
    server.redis.close()
