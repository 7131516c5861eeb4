"""What keeps a book and its ledger in Redis alike: registration, lease, regular sync."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from indexer.contract import functions, reservations
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.limits import ROUTER_LEASE_RENEW_S
from indexer.contract.link import Link
from router import telemetry
from router.book import Book, new_router_id

log = structlog.get_logger()

SYNC_EVERY_S: Final = 10.0
"""The longest that a ledger in Redis may differ from its book after a write whose outcome is
unknown."""

SHUTDOWN_S: Final = 2.0


class Leases:
    """This router's registrations in Redis, one of each book.

    Args:
        link: to Redis.
        deadline_s: for a renewal, and for a sync.
        registered: told after each registration, which leaves something to sync.
    """

    def __init__(self, link: Link, *, deadline_s: float, registered: Callable[[], None]) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._registered = registered

    async def register(self, book: Book) -> None:
        """Take a lease, if there is none; raises what `functions.run` raises."""
        async with book.registering:
            if book.registered:
                return
            fleet, router_id = book.fleet.fleet_id, new_router_id()
            # Whatever the earlier registration still has in Redis is sent again under this one.
            await functions.run(self._link, reservations.reap(fleet, book.router_id))
            await functions.run(self._link, reservations.register(fleet, router_id, begin=True))
            book.router_id, book.registered = router_id, True
            book.renewed_s = time.monotonic()
            book.needs_sync = bool(book.entries)
            log.info("router_registered", router_id=router_id, fleet=book.fleet.model_scope)
            self._registered()

    async def tend(self, book: Book) -> bool:
        """Renew and sync, where due; whether Redis was asked anything.

        Raises what `functions.run` raises; TimeoutError: Redis did not answer in time.
        """
        asked, now_s = False, time.monotonic()
        if not book.registered or now_s - book.renewed_s >= ROUTER_LEASE_RENEW_S:
            async with asyncio.timeout(self._deadline_s):
                await self._renew(book)
            asked = True
        if book.needs_sync or now_s - book.synced_s >= SYNC_EVERY_S:
            await self._sync(book)
            asked = True
        return asked

    async def leave(self, books: Iterable[Book]) -> None:
        """Give everything back, so that nobody has to wait for the leases to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                for book in books:
                    if book.registered:
                        call = reservations.reap(book.fleet.fleet_id, book.router_id)
                        with contextlib.suppress(*REDIS_WEATHER):
                            await functions.run(self._link, call)

    async def _renew(self, book: Book) -> None:
        if book.registered:
            call = reservations.register(book.fleet.fleet_id, book.router_id, begin=False)
            book.registered = await functions.run(self._link, call) == 1
            book.renewed_s = time.monotonic()
            if not book.registered:
                telemetry.LEASES_LOST.inc()
        await self.register(book)
        taken = await functions.run(self._link, reservations.reap(book.fleet.fleet_id))
        if taken:
            router_id, count = taken
            telemetry.REAPED.inc(count)
            log.warning("router_reaped", router_id=router_id.decode(), reservations=count)

    async def _sync(self, book: Book) -> None:
        """Send the whole book."""
        was_needed, book.needs_sync = book.needs_sync, False  # what comes meanwhile sets it again
        reply = None
        try:
            async with asyncio.timeout(self._deadline_s), book.quiet():
                for entry in book.entries.values():
                    entry.in_redis = True
                call = reservations.sync(
                    book.fleet.fleet_id,
                    book.router_id,
                    book.packed(),
                    forget_tombstones=not was_needed,
                )
                reply = await functions.run(self._link, call)
        finally:
            book.needs_sync = book.needs_sync or not reply
        if not reply:
            book.registered = False
            return
        added, taken = reply
        if added or taken:
            telemetry.LEDGER_CORRECTIONS.inc(added + taken)
            log.info("ledger_corrected", booked=added, taken_back=taken)
        book.synced_s = time.monotonic()
