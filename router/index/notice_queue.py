"""Tells sidecars what their engine had more or less in its KV$ than the index said, or computed.

Off the path of requests: a bounded queue, sent by one task. A notice that cannot be told is counted
and forgotten; the next difference tells the same.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

from indexer.contract import fleet_functions, functions
from indexer.contract.call import Call
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId, SlotIndex
from indexer.contract.limits import BLOCK_HASH_BYTES, NOTICE_BLOCKS_MAX
from indexer.contract.link import Link
from indexer.contract.records import Notice
from router import telemetry

log = structlog.get_logger()

QUEUE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Notices that wait to be sent; one has up to 128 KiB."""

PER_INSTANCE_PER_S: Final = 10.0
"""A sidecar judges by a few; the rest would only cost."""

COMPUTED_PER_INSTANCE_PER_S: Final = 200.0
"""Of computed chains, from which it learns all it knows of them: more requests than it serves."""

INSTANCES_MAX: Final = 4096
"""Instances whose rate is remembered."""

SEND_MAX: Final = 32
RETRY_S: Final = 0.5


@dataclass(slots=True)
class _RateLimit:
    """How many notices of one instance may be sent now."""

    left: float
    at_s: float


class NoticeQueue:
    """A queue of notices and the task that sends them.

    Args:
        link: to Redis.
        deadline_s: for one send.
    """

    def __init__(self, link: Link, *, deadline_s: float) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._queue: deque[Call] = deque()
        self._queued_bytes = 0
        self._limits: dict[tuple[FleetId, int, int, bool], _RateLimit] = {}
        self._wake = asyncio.Event()

    def tell(self, fleet: FleetId, slot: int, generation: int, notice: Notice) -> None:
        """Queue a notice for the sidecar of a slot; returns at once."""
        if len(notice.hashes) > NOTICE_BLOCKS_MAX * BLOCK_HASH_BYTES:
            telemetry.NOTICES.labels(result="too_long").inc()
            return
        if not self._allowed((fleet, slot, generation, notice.computed)):
            telemetry.NOTICES.labels(result="too_many").inc()
            return
        packed = notice.encode()
        if self._queued_bytes + len(packed) > QUEUE_BYTES_MAX:
            telemetry.NOTICES.labels(result="queue_full").inc()
            return
        self._queue.append(fleet_functions.notice(fleet, SlotIndex(slot), generation, packed))
        self._queued_bytes += len(packed)
        self._wake.set()

    def waiting(self) -> int:
        """Notices not sent yet."""
        return len(self._queue)

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        failing = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                calls = [self._queue[i] for i in range(min(len(self._queue), SEND_MAX))]
                result = await self._send(calls)
                for call in calls:
                    self._queue.popleft()
                    self._queued_bytes -= len(_packed(call))
                if result is None:
                    if failing:
                        log.info("notices_recovered")
                    failing = False
                else:
                    telemetry.NOTICES.labels(result="failed").inc(len(calls))
                    if not failing:
                        log.warning("notices_failed", error=repr(result))
                    failing = True
                    await asyncio.sleep(RETRY_S)

    async def _send(self, calls: list[Call]) -> Exception | None:
        try:
            async with asyncio.timeout(self._deadline_s):
                replies = await functions.run_all(self._link, calls)
        except REDIS_WEATHER as error:
            return error
        for reply in replies:
            telemetry.NOTICES.labels(result="told" if reply == 1 else "gone").inc()
        return None

    def _allowed(self, key: tuple[FleetId, int, int, bool]) -> bool:
        per_s = COMPUTED_PER_INSTANCE_PER_S if key[-1] else PER_INSTANCE_PER_S
        now_s = time.monotonic()
        limit = self._limits.get(key)
        if limit is None:
            if len(self._limits) >= INSTANCES_MAX:
                self._limits.clear()
            limit = self._limits[key] = _RateLimit(per_s, now_s)
        gained = (now_s - limit.at_s) * per_s
        limit.left = min(per_s, limit.left + gained)
        limit.at_s = now_s
        if limit.left < 1:
            return False
        limit.left -= 1
        return True


def _packed(call: Call) -> bytes:
    packed = call.args[2]
    assert isinstance(packed, bytes)
    return packed
