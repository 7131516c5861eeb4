"""What one API key may use by this router's own count, while Redis does not answer. Pure.

The law and its arithmetic are those of `quota_v1.lua`, with this router's share of the limits.
"""

import math
from dataclasses import dataclass
from typing import Final

from indexer.contract.limits import QUOTA_DEBT_MAX_S
from indexer.contract.quota import UNLIMITED, Pace, QuotaReply, Verdict
from router.door.visitor import KeyLimits, Rate

_DEBT_US: Final = QUOTA_DEBT_MAX_S * 1e6


@dataclass(slots=True)
class LocalQuota:
    """When what a key has used at this router will be paid for, in microseconds."""

    requests_us: float = 0.0
    tokens_us: float = 0.0

    def take(
        self, limits: KeyLimits, *, now_us: float, in_flight: int, tokens_count: int, routers: int
    ) -> QuotaReply:
        """Admit one request, or say what is in its way; refused, it costs nothing.

        Args:
            limits: of the key.
            now_us: time.
            in_flight: requests of the key at this router, with this one.
            tokens_count: that the request costs.
            routers: that share the limits; each has a part, at least one of everything.
        """
        requests, tokens = (_shared(one, routers) for one in (limits.requests, limits.tokens))
        after_request = _paid_at(self.requests_us, now_us, requests) + requests.interval_us
        cost_us = tokens_count * tokens.interval_us
        after_tokens = _paid_at(self.tokens_us, now_us, tokens) + cost_us
        most = limits.concurrent_requests_max
        verdict, wait_us = Verdict.ADMITTED, 0.0
        if most is not None and in_flight > max(1, most // routers):
            verdict = Verdict.CONCURRENT
        elif after_request > now_us + requests.window_us:
            verdict, wait_us = Verdict.REQUESTS, after_request - now_us - requests.window_us
        elif limits.tokens and tokens_count > limits.tokens.burst:
            verdict = Verdict.NEVER
        elif after_tokens > now_us + max(tokens.window_us, cost_us):
            verdict, wait_us = Verdict.TOKENS, after_tokens - now_us - tokens.window_us
        if verdict is Verdict.ADMITTED:
            self.requests_us, self.tokens_us = after_request, after_tokens
        return QuotaReply(
            verdict=verdict,
            wait_s=math.ceil(wait_us) / 1e6,
            requests_left=None,
            tokens_left=None,
            routers_count=routers,
        )

    def settle(self, limits: KeyLimits, *, now_us: float, tokens_count: int, routers: int) -> None:
        """Count tokens of a request that has ended."""
        pace = _shared(limits.tokens, routers)
        cost_us = tokens_count * pace.interval_us
        self.tokens_us = _paid_at(self.tokens_us, now_us, pace) + cost_us


def pace_of(rate: Rate | None) -> Pace:
    """A rate as the functions reckon with it."""
    if rate is None:
        return UNLIMITED
    return Pace.of(per_minute=rate.per_minute, burst=rate.burst)


def _shared(rate: Rate | None, routers: int) -> Pace:
    """A router's part of a rate; a window holds at least one interval, or nothing would pass."""
    whole = pace_of(rate)
    interval_us = whole.interval_us * routers
    return Pace(interval_us=interval_us, window_us=max(whole.window_us, interval_us))


def _paid_at(value_us: float, now_us: float, pace: Pace) -> float:
    return min(max(value_us, now_us), now_us + pace.window_us + _DEBT_US)
