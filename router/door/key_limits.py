"""Limits of API keys, counted in Redis for all routers, and by this one alone while Redis is away.

A request is counted here from the moment it arrives. Once its prompt is known, one call charges it
to the key and says whether it may go on; when it has ended, what its output cost is told in the
background, together with how many requests of the key are left here.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import structlog

from indexer.contract import functions, quota
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.limits import QUOTA_RENEW_S
from indexer.contract.link import Link
from indexer.contract.quota import QuotaReply, Verdict
from router import telemetry
from router.door.local_quota import LocalQuota, pace_of
from router.door.visitor import Caller, KeyLimits
from router.errors import IndexUnavailable, KeyLimited
from router.index.redis_guard import Call, RedisGuard

log = structlog.get_logger()

CONCURRENT_RETRY_S: Final = 0.05
"""A client that sends one request after the other may be here before its last one's end is told."""

CONCURRENT_WAIT_S: Final = 1.0
"""What a client is told to wait for a request of its own to end."""

SETTLE_MAX: Final = 64
"""Keys told of in one round trip."""

RETRY_S: Final = 0.5


class _Account:
    """What this router knows of one key."""

    __slots__ = (
        *("alone", "caller", "dirty", "in_flight", "local", "refused_until_s", "routers"),
        "unsettled",
    )

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.alone = False  # the last request was counted here alone
        self.in_flight = 0
        self.unsettled = 0  # tokens of requests that have ended
        self.dirty = False
        self.refused_until_s = 0.0
        self.routers = 1
        self.local = LocalQuota()


class Visit:
    """One request of a key, from its arrival to its end."""

    __slots__ = ("_account", "_limits", "charged")

    def __init__(self, limits: "KeyLimiter", account: _Account | None) -> None:
        self._limits = limits
        self._account = account
        self.charged = False

    async def charge(self, tokens_count: int) -> Mapping[str, str]:
        """Count the request and its prompt tokens.

        Returns:
            Headers for the client, named as OpenAI names them: its limits and what is left.

        Raises:
            KeyLimited: the key has used up what it may use; says when to come again.
        """
        if self._account is None:
            return {}
        reply = await self._limits.charge(self._account, tokens_count)
        self.charged = True
        return _headers(self._account.caller.limits, reply)


class KeyLimiter:
    """The limits of all keys, as one router sees to them.

    Args:
        link: to Redis.
        guard: deadline and breaker of calls.
    """

    def __init__(self, link: Link, *, guard: RedisGuard) -> None:
        self._link = link
        self._guard = guard
        self._router = uuid.uuid4().hex[:16]
        self._accounts: dict[str, _Account] = {}
        self._unlimited = nullcontext(Visit(self, None))
        self._wake = asyncio.Event()

    def visit(
        self, caller: Caller | None, output_tokens: Callable[[], int]
    ) -> AbstractContextManager[Visit]:
        """Count one request as in flight until the context ends.

        Args:
            caller: whose it is.
            output_tokens: asked at the end.

        Raises:
            KeyLimited: it cannot be admitted whatever its prompt is, as this router knows already.
        """
        if caller is None or not caller.limits:
            return self._unlimited
        return self._limited_visit(caller, output_tokens)

    @contextmanager
    def _limited_visit(self, caller: Caller, output_tokens: Callable[[], int]) -> Iterator[Visit]:
        account = self._accounts.setdefault(caller.name, _Account(caller))
        account.caller = caller  # its limits may have been changed
        self._refuse_early(account)
        account.in_flight += 1
        visit = Visit(self, account)
        try:
            yield visit
        finally:
            account.in_flight -= 1
            used = output_tokens() if visit.charged else 0
            self._ended(account, used)

    def _ended(self, account: _Account, tokens_count: int) -> None:
        if account.alone:
            account.local.settle(
                account.caller.limits,
                now_us=_now_us(),
                tokens_count=tokens_count,
                routers=account.routers,
            )
        else:
            account.unsettled += tokens_count
        account.dirty = True
        self._wake.set()

    def _refuse_early(self, account: _Account) -> None:
        most = account.caller.limits.concurrent_requests_max
        if most is not None and account.in_flight >= most:
            raise _limited(account.caller, Verdict.CONCURRENT, CONCURRENT_WAIT_S)
        wait_s = account.refused_until_s - time.monotonic()
        if wait_s > 0:
            raise _limited(account.caller, Verdict.REQUESTS, wait_s)

    async def charge(self, account: _Account, tokens_count: int) -> QuotaReply:
        """See `Visit.charge`."""
        reply = await self._take(account, tokens_count)
        if reply.verdict is Verdict.CONCURRENT:
            await asyncio.sleep(CONCURRENT_RETRY_S)
            reply = await self._take(account, tokens_count)
        if reply.verdict is Verdict.ADMITTED:
            return reply
        if reply.verdict is Verdict.REQUESTS:
            account.refused_until_s = time.monotonic() + reply.wait_s
        wait_s = CONCURRENT_WAIT_S if reply.verdict is Verdict.CONCURRENT else reply.wait_s
        raise _limited(account.caller, reply.verdict, wait_s, tokens_count)

    async def _take(self, account: _Account, tokens_count: int) -> QuotaReply:
        limits = account.caller.limits
        call = quota.take(
            account.caller.name,
            self._router,
            in_flight=account.in_flight,
            concurrent_max=limits.concurrent_requests_max,
            requests=pace_of(limits.requests),
            tokens=pace_of(limits.tokens),
            tokens_count=tokens_count,
        )
        try:
            with self._guard.asking(Call.WRITE):
                reply = quota.take_reply(await functions.run(self._link, call))
        except (IndexUnavailable, *REDIS_WEATHER):
            telemetry.KEY_LIMITS_ALONE.inc()
            account.alone = True
            return account.local.take(
                limits,
                now_us=_now_us(),
                in_flight=account.in_flight,
                tokens_count=tokens_count,
                routers=account.routers,
            )
        account.alone = False
        account.routers = max(1, reply.routers_count)
        return reply

    async def run(self) -> None:
        """Tell Redis what has been used and what is in flight, until cancelled."""
        failing = False
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + QUOTA_RENEW_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at_s):
                    await self._wake.wait()
            if loop.time() >= renew_at_s:  # also where other keys' requests end all the time
                renew_at_s = loop.time() + QUOTA_RENEW_S
                for account in self._accounts.values():
                    account.dirty = account.dirty or account.in_flight > 0
            self._wake.clear()
            # Who becomes dirty meanwhile has the next turn: a busy key keeps none from being told.
            dirty = [one for one in self._accounts.values() if one.dirty]
            for start in range(0, len(dirty), SETTLE_MAX):
                error = await self._settle(dirty[start : start + SETTLE_MAX])
                if error is not None and not failing:
                    log.warning("key_limits_not_shared", error=repr(error))
                elif error is None and failing:
                    log.info("key_limits_shared_again")
                failing = error is not None
                if failing:
                    await asyncio.sleep(RETRY_S)
                    self._wake.set()
                    break
            self._forget()

    async def _settle(self, accounts: list[_Account]) -> Exception | None:
        """What a lost answer leaves open is not told again: nobody shall pay twice."""
        calls = []
        for account in accounts:
            account.dirty = False
            pace = pace_of(account.caller.limits.tokens)
            calls.append(
                quota.settle(
                    account.caller.name,
                    self._router,
                    in_flight=account.in_flight,
                    tokens=pace,
                    tokens_count=account.unsettled,
                )
            )
            account.unsettled = 0
        try:
            async with asyncio.timeout(self._guard.deadline_s):
                await functions.run_all(self._link, calls)
        except REDIS_WEATHER as error:
            for account in accounts:
                account.dirty = True
            return error
        return None

    def _forget(self) -> None:
        """Accounts of keys that nobody uses now are as good as new ones in a while."""
        horizon_us = _now_us()
        idle = [
            name
            for name, one in self._accounts.items()
            if not (one.in_flight or one.dirty)
            and max(one.local.requests_us, one.local.tokens_us) < horizon_us
            and one.refused_until_s < time.monotonic()
        ]
        for name in idle:
            del self._accounts[name]


_SAID: Final = {
    Verdict.REQUESTS: ("requests", "has used up its requests per minute"),
    Verdict.TOKENS: ("tokens", "has used up its tokens per minute"),
    Verdict.CONCURRENT: ("concurrent", "has as many requests in flight as it may have"),
    Verdict.NEVER: ("tokens", "is never admitted a prompt of so many tokens: send a shorter one"),
}


def _limited(
    caller: Caller, verdict: Verdict, wait_s: float, tokens_count: int | None = None
) -> KeyLimited:
    limit, said = _SAID[verdict]
    telemetry.KEY_REFUSALS.labels(limit=limit).inc()
    message = f"The key `{caller.name}` {said}"
    if verdict is Verdict.NEVER:
        return KeyLimited(f"{message} ({tokens_count}).", limit=limit, retry_after_s=None)
    return KeyLimited(
        f"{message}. Repeat the request in {wait_s:.1f} s.", limit=limit, retry_after_s=wait_s
    )


def _headers(limits: KeyLimits, reply: QuotaReply) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, rate, left in (
        ("requests", limits.requests, reply.requests_left),
        ("tokens", limits.tokens, reply.tokens_left),
    ):
        if rate is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.per_minute)
        if left is not None:
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
    return headers


def _now_us() -> float:
    return time.monotonic() * 1e6
