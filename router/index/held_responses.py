"""Which instance holds which answer of `/v1/responses`, shared by all routers in Redis.

An engine keeps such answers in its own memory, and a later request names one by its id. An id is
read from the beginning of an answer, remembered here and told to Redis by a task: no answer waits
for that. A request that names one is looked up here first, then in Redis.
"""

import asyncio
import math
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import structlog

from indexer.contract import functions, responses
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.link import Link
from indexer.contract.responses import Holder, id_digest
from router import telemetry
from router.errors import IndexUnavailable
from router.index.redis_guard import Call, RedisGuard

log = structlog.get_logger()

KNOWN_MAX: Final = 1 << 14
"""Ids remembered by this process itself, some 5 MB; the least recently used give way."""

QUEUE_MAX: Final = 4096
"""Ids that wait to be told; the oldest give way."""

SEND_MAX: Final = 64
RETRY_S: Final = 0.5

ID_WITHIN_BYTES: Final = 4096
"""Where an id has to stand; vLLM's is the first field, of a stream's first event, too."""

_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')


class HeldResponses:
    """What one router knows of who holds which response.

    Args:
        link: to Redis.
        guard: deadline and breaker of calls.
        kept_s: how long an id is remembered, rounded up to whole seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        link: Link,
        *,
        guard: RedisGuard,
        kept_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._guard = guard
        self._kept_s = math.ceil(kept_s)
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Holder, float]] = OrderedDict()  # and until when
        self._queue: deque[tuple[bytes, Holder]] = deque()
        self._wake = asyncio.Event()

    def learn(self, beginning: bytes, fleet: FleetId, instance_id: InstanceId) -> None:
        """An answer that its engine may keep has begun; returns at once.

        Args:
            beginning: of the answer's body, JSON or a stream of events.
            fleet: of the instance.
            instance_id: who answers.
        """
        found = _ID.search(beginning, 0, ID_WITHIN_BYTES)
        if found is None:
            telemetry.RESPONSES_LEARNED.labels(result="unread").inc()
            return
        digest = id_digest(found[1].decode(errors="replace"))
        holder = Holder.of(fleet, instance_id)
        self._known[digest] = holder, self._clock() + self._kept_s
        self._known.move_to_end(digest)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            telemetry.RESPONSES_LEARNED.labels(result="dropped").inc()
        self._queue.append((digest, holder))
        self._wake.set()

    async def find(self, response_id: str) -> Holder | None:
        """Who holds a response; None where nobody knows, which is counted."""
        digest = id_digest(response_id)
        known = self._known.get(digest)
        if known is not None:
            holder, until_s = known
            if until_s > self._clock():
                self._known.move_to_end(digest)
                return holder
            del self._known[digest]
        try:
            with self._guard.asking(Call.READ):
                packed = await functions.run(self._link, responses.find(digest))
        except (IndexUnavailable, *REDIS_WEATHER):
            telemetry.INDEX_ERRORS.labels(call="response").inc()
            telemetry.RESPONSES_NAMED.labels(result="unavailable").inc()
            return None
        if packed is None:
            telemetry.RESPONSES_NAMED.labels(result="unknown").inc()
            return None
        return Holder.unpack(packed)

    def waiting(self) -> int:
        """Ids that Redis has not been told."""
        return len(self._queue)

    async def run(self) -> None:
        """Tell Redis what was learned, until cancelled; again, where it did not take it."""
        failing = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                error = await self._tell_all()
                if error is None and failing:
                    log.info("responses_shared_again")
                elif error is not None and not failing:
                    log.warning("responses_not_shared", error=repr(error))
                failing = error is not None
                if failing:
                    await self._guard.until_retry(RETRY_S)

    async def _tell_all(self) -> Exception | None:
        """What waits now, each once; the first failure. Where nobody answers it ends early."""
        first, left = None, len(self._queue)
        while left > 0 and self._queue:
            error = await self._tell()
            left -= SEND_MAX
            first = first or error
            if error is not None and self._guard.is_open:
                break
        return first

    async def _tell(self) -> Exception | None:
        """The oldest ones, in one round trip; after all others again, where it fails.

        Some of them may never be taken, as when one shard is away: the others shall not wait.
        """
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), SEND_MAX))]
        calls = [responses.hold(digest, holder, kept_s=self._kept_s) for digest, holder in batch]
        try:
            async with asyncio.timeout(self._guard.deadline_s):
                await functions.run_all(self._link, calls)
        except REDIS_WEATHER as error:
            kept = batch[max(0, len(self._queue) + len(batch) - QUEUE_MAX) :]  # the youngest
            self._queue.extend(kept)
            telemetry.RESPONSES_LEARNED.labels(result="dropped").inc(len(batch) - len(kept))
            return error
        telemetry.RESPONSES_LEARNED.labels(result="told").inc(len(batch))
        return None
