"""Asks ejected instances how they are, once their leases are over; no user's request is risked."""

import asyncio
import ssl
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

import aiohttp

from indexer.contract.identifiers import InstanceId
from indexer.contract.records import InstanceRecord
from router.instances.ejections import Ejections

HEALTH_PATH: Final = "/health"
"""vLLM does not count it among its requests, and asks its engine process before it answers."""

PROBE_TIMEOUT_S: Final = 2.0
PROBE_EVERY_S: Final = 0.25
PROBES_MAX: Final = 64
"""At once; the others come next."""

FAILED_MIN: Final = 500
"""Whoever answers less than this answers; not every engine has the path."""


class Prober:
    """A background task.

    Args:
        ejections: says whom to probe, and is told.
        present: ids of all instances that are members of some fleet.
        tls: how certificates of engines are checked; None: by the system's authorities.
    """

    def __init__(
        self,
        ejections: Ejections,
        present: Callable[[], AbstractSet[InstanceId]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._ejections = ejections
        self._present = present
        self._tls = tls

    async def run(self) -> None:
        """Probe whoever is due until cancelled."""
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=True,  # a new way, not a kept one
            ssl=self._tls or True,
        )
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                self._ejections.keep(self._present())
                async with asyncio.TaskGroup() as probes:
                    for instance in self._ejections.due()[:PROBES_MAX]:
                        probes.create_task(self._probe(session, instance))
                await asyncio.sleep(PROBE_EVERY_S)

    async def _probe(self, session: aiohttp.ClientSession, instance: InstanceRecord) -> None:
        url = instance.url.rstrip("/") + HEALTH_PATH
        try:
            async with session.get(url, allow_redirects=False) as answer:
                healthy = answer.status < FAILED_MIN
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            healthy = False
        self._ejections.probed(instance, healthy=healthy)
