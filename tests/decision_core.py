"""The decision core of one router on a real server, without HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from builders import make_request
from fleets import chain

from indexer.contract.link import Link, connected
from indexer.contract.milestones import Milestones
from indexer.contract.request_classes import ClassPrefixes
from router.detector import detect
from router.eligibility import eligible_snapshot
from router.errors import IndexUnavailable
from router.index.index_client import IndexClient
from router.ledger import Ledger
from router.policies import POLICIES
from router.snapshot import Booking, Decision

PROMPT = list(range(100))
DEADLINE_S = 0.25


class RouterCore:
    """Looks, decides, books.

    Args:
        link: to Redis.
        deadline_s: for each call.
        in_flight_credit: as of `router.route.Router`.
        detect_hot_prefixes: likewise.
    """

    def __init__(
        self,
        link: Link,
        *,
        deadline_s: float = DEADLINE_S,
        in_flight_credit: bool = True,
        detect_hot_prefixes: bool = False,
    ) -> None:
        self.link = link
        self.index = IndexClient(link, deadline_s=deadline_s)
        self.ledger = Ledger(link, deadline_s=deadline_s)
        self.in_flight_credit = in_flight_credit
        self.detect_hot_prefixes = detect_hot_prefixes
        self.count = 0

    async def decide(
        self,
        policy: str = "lmetric",
        request_id: str = "",
        prompt: Sequence[int] = PROMPT,
        model: str = "m",
    ) -> tuple[Decision, Booking]:
        """Decide and book one request."""
        served = await self.index.find(model)
        assert served is not None
        block_size_tokens = served.fleet.block_size_tokens
        hashes = b"".join(chain(served.fleet, prompt))
        milestones = None
        if self.in_flight_credit:
            milestones = Milestones.of(
                hashes, prompt_tokens=len(prompt), block_size_tokens=block_size_tokens
            )
        prefixes = ClassPrefixes.of(hashes) if self.detect_hot_prefixes else None
        try:
            sighting = await self.index.look(served, hashes, milestones, prefixes)
        except IndexUnavailable:
            sighting = self.index.last_sighting(served)
        snapshot = eligible_snapshot(sighting, len(prompt))
        self.count += 1
        request = make_request(
            len(prompt), request_id=request_id or f"{id(self)}-{self.count}", sequence=self.count
        )
        if snapshot.degraded:
            return self.ledger.reserve_alone(POLICIES[policy], request, snapshot)
        detection = None
        if prefixes is not None:
            detection = detect(prefixes, sighting.recent_classes, snapshot, pool=0)
            snapshot = detection.candidates(snapshot)
        return await self.ledger.reserve(POLICIES[policy], request, snapshot, milestones, detection)


@contextlib.asynccontextmanager
async def running(
    socket: Path,
    *,
    deadline_s: float = DEADLINE_S,
    in_flight_credit: bool = True,
    detect_hot_prefixes: bool = False,
) -> AsyncIterator[RouterCore]:
    """A router whose tasks run; the ledger ends before the link does."""
    async with connected(f"unix://{socket}") as link, asyncio.TaskGroup() as tasks:
        router = RouterCore(
            link,
            deadline_s=deadline_s,
            in_flight_credit=in_flight_credit,
            detect_hot_prefixes=detect_hot_prefixes,
        )
        ledger = tasks.create_task(router.ledger.run())
        try:
            yield router
        finally:
            ledger.cancel()
            await asyncio.wait([ledger])
