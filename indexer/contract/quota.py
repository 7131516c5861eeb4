"""What API keys use, counted for all routers: builders of the functions in `quota_v1.lua`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from indexer.contract import keys
from indexer.contract.call import Call
from indexer.contract.limits import QUOTA_DEBT_MAX_S, QUOTA_LEASE_S

MINUTE_US: Final = 60_000_000
_LEASE_US: Final = round(QUOTA_LEASE_S * 1e6)
_DEBT_US: Final = round(QUOTA_DEBT_MAX_S * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A rate as the functions reckon with it.

    Attributes:
        interval_us: between two units in the long run; 0 for no limit.
        window_us: how far ahead of now what was used may be paid for.
    """

    interval_us: float = 0.0
    window_us: float = 0.0

    @classmethod
    def of(cls, *, per_minute: int, burst: int) -> "Pace":
        """So much a minute, and so much at once."""
        interval_us = MINUTE_US / per_minute
        return cls(interval_us=interval_us, window_us=burst * interval_us)


UNLIMITED: Final = Pace()


class Verdict(IntEnum):
    """What `take` answers."""

    ADMITTED = 0
    REQUESTS = 1
    TOKENS = 2
    CONCURRENT = 3
    NEVER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaReply:
    """What Redis says to one request of a key.

    Attributes:
        verdict: admitted, or what is in the way.
        wait_s: until the rate in the way allows it; 0 where that is not known.
        requests_left: that would be admitted now; None without a limit.
        tokens_left: likewise.
        routers_count: that have had requests of this key within a lease.
    """

    verdict: Verdict
    wait_s: float
    requests_left: int | None
    tokens_left: int | None
    routers_count: int


def take(
    caller: str,
    router: str,
    *,
    in_flight: int,
    concurrent_max: int | None,
    requests: Pace,
    tokens: Pace,
    tokens_count: int,
) -> Call:
    """Admit one request; see `take_reply`.

    Args:
        caller: name of the key.
        router: id of the router process.
        in_flight: requests of the key at this router, with this one.
        concurrent_max: at all routers; None for any number.
        requests: pace of requests.
        tokens: pace of tokens.
        tokens_count: that the request costs.
    """
    return Call(
        "ts1_quota_take",
        (keys.quota(caller),),
        (
            router,
            in_flight,
            concurrent_max or 0,
            _LEASE_US,
            _DEBT_US,
            requests.interval_us,
            requests.window_us,
            tokens.interval_us,
            tokens.window_us,
            tokens_count,
        ),
    )


def take_reply(reply: Sequence[Any]) -> QuotaReply:
    """Decode what `take` returned."""
    verdict, wait_us, requests_left, tokens_left, routers_count = (int(one) for one in reply)
    return QuotaReply(
        verdict=Verdict(verdict),
        wait_s=wait_us / 1e6,
        requests_left=None if requests_left < 0 else requests_left,
        tokens_left=None if tokens_left < 0 else tokens_left,
        routers_count=routers_count,
    )


def settle(caller: str, router: str, *, in_flight: int, tokens: Pace, tokens_count: int) -> Call:
    """Say how many requests of a key are in flight at a router, and what others have cost since.

    Args:
        caller: name of the key.
        router: id of the router process.
        in_flight: requests of the key at this router.
        tokens: pace of tokens.
        tokens_count: used beyond what was known when the requests were admitted.
    """
    return Call(
        "ts1_quota_settle",
        (keys.quota(caller),),
        (
            router,
            in_flight,
            _LEASE_US,
            _DEBT_US,
            tokens.interval_us,
            tokens.window_us,
            tokens_count,
        ),
    )
