"""One process as the sidecar of many engines without events, as a list of them changes."""

import asyncio
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry

from indexer.approximate.engine_list import EngineList
from indexer.approximate.learner import LEARNED_BLOCKS_MAX
from indexer.approximate.merged_metrics import MergedMetrics
from indexer.config import SidecarConfig
from indexer.contract.limits import INSTANCE_LEASE_RENEW_S
from indexer.contract.link import Link
from indexer.draining import Drain
from indexer.engine.engine_api import EngineApi
from indexer.engine.engine_tls import engine_context
from indexer.errors import EngineUnsuitable, ListUnreadable, first
from indexer.sidecar import Sidecar
from indexer.telemetry import Telemetry

ENGINES_MAX: Final = 256
"""Of one process, which asks each of them every second; of a longer list the rest is left out."""

LIST_EVERY_S: Final = 2.0
"""Between two readings of the list."""

UNSUITABLE_RETRY_S: Final = 30.0
"""An engine that cannot be indexed as it is may be another one by then."""

ALL_LEARNED_BLOCKS_MAX: Final = 1 << 22
"""Learned blocks of all engines together, in equal shares: about a gigabyte here."""

SCRAPES_PER_S_MAX: Final = 200
"""Of all engines together, about an eighth of a core; each is asked once a second at least."""


class Engines:
    """A sidecar for each engine on the list, all in this process; they share nothing but Redis.

    Args:
        config: of each, but for the engine's URL.
        engine_list: who they are.
        link: to Redis.
        registry: gets the metrics of all, with the label `engine`, empty for those of the process.
        drains: wishes of operators.
    """

    def __init__(
        self,
        config: SidecarConfig,
        engine_list: EngineList,
        link: Link,
        *,
        registry: CollectorRegistry,
        drains: "Drains",
    ) -> None:
        self._tls = engine_context(config)
        self._config = replace(config, approximate=True, engines_file=None, engines_dns=None)
        self._list = engine_list
        self._link = link
        self._registries = {"": CollectorRegistry()}
        self._telemetry = Telemetry(self._registries[""])
        self._drains = drains
        self._tasks: dict[str, asyncio.Task[None]] = {}
        registry.register(MergedMetrics(self._registries))
        self._is_failing = False
        self._left_out_count = 0
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Follow the list until cancelled; then all leave."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    urls = await self._list.read()
                except ListUnreadable as error:
                    self._note_failure(error)
                else:
                    self._is_failing = False
                    self._follow(self._bounded(urls), tasks)
                await asyncio.sleep(LIST_EVERY_S)

    def interval_s(self) -> float:
        """Between two looks at one engine."""
        shared_s = len(self._tasks) / SCRAPES_PER_S_MAX
        wanted_s = max(float(self._config.scrape_interval_s), shared_s)
        return min(wanted_s, INSTANCE_LEASE_RENEW_S)

    def learned_blocks_max(self) -> int:
        """Of each rank of an engine; less with every engine that comes."""
        return min(LEARNED_BLOCKS_MAX, ALL_LEARNED_BLOCKS_MAX // max(len(self._tasks), 1))

    def _bounded(self, urls: tuple[str, ...]) -> tuple[str, ...]:
        left_out_count = max(0, len(urls) - ENGINES_MAX)
        if left_out_count and left_out_count != self._left_out_count:
            remedy = "start further sidecars"
            self._log.warning("engines_left_out", engines=left_out_count, remedy=remedy)
        self._left_out_count = left_out_count
        return urls[:ENGINES_MAX]

    def _follow(self, urls: tuple[str, ...], tasks: asyncio.TaskGroup) -> None:
        for url in set(self._tasks) - set(urls):
            self._log.info("engine_unlisted", engine=label_of(url))
            self._tasks.pop(url).cancel()
        # One that was unlisted and still leaves keeps its address until it has left.
        taken = {*self._registries, *map(label_of, self._tasks)}
        for url in urls:
            label = label_of(url)
            if label not in taken:
                taken.add(label)
                self._log.info("engine_listed", engine=label)
                self._tasks[url] = tasks.create_task(self._serve(url))
        self._telemetry.engines.set(len(self._tasks))

    def _note_failure(self, error: ListUnreadable) -> None:
        self._telemetry.list_failures.inc()
        if not self._is_failing:
            self._log.warning("engine_list_unreadable", error=str(error), engines=len(self._tasks))
        self._is_failing = True

    async def _serve(self, url: str) -> None:
        """Be the sidecar of one engine; whatever is wrong with it concerns no other."""
        label = label_of(url)
        config = replace(self._config, engine_url=url)
        registry = self._registries[label] = CollectorRegistry()
        telemetry, drain = Telemetry(registry), self._drains.add(label)
        structlog.contextvars.bind_contextvars(engine=label)  # of this task and those it starts
        try:
            async with EngineApi(url, api_key=config.engine_api_key, tls=self._tls) as api:
                while True:
                    sidecar = Sidecar(
                        config,
                        api,
                        self._link,
                        telemetry=telemetry,
                        drain=drain,
                        interval_s=self.interval_s,
                        learned_blocks_max=self.learned_blocks_max,
                    )
                    try:
                        await sidecar.run()
                    except* EngineUnsuitable as failures:
                        self._telemetry.engine_failures.inc()
                        self._log.error("engine_unsuitable", error=str(first(failures)))
                    await asyncio.sleep(UNSUITABLE_RETRY_S)
        finally:
            del self._registries[label]
            self._drains.remove(label)


class Drains:
    """Wishes of operators for all engines of this process, or for one of them."""

    def __init__(self, *, is_draining: bool = False) -> None:
        self._is_draining = is_draining
        self._drains: dict[str, Drain] = {}

    def add(self, engine: str) -> Drain:
        """A new engine, to which applies what was wished for all."""
        return self._drains.setdefault(engine, Drain(is_draining=self._is_draining))

    def remove(self, engine: str) -> None:
        """An engine is not on the list any more."""
        del self._drains[engine]

    def wish(self, *, is_draining: bool) -> None:
        """Drain all, or take requests again; see `Drain.wish`."""
        self._is_draining = is_draining
        for drain in self._drains.values():
            drain.wish(is_draining=is_draining)

    def one(self, engine: str) -> Drain | None:
        """Of one engine by its host:port; None when it is not on the list."""
        return self._drains.get(engine)

    def state(self) -> dict[str, Any]:
        """For operators, as JSON: over all engines as `Drain.state`, and each."""
        states = {engine: drain.state() for engine, drain in self._drains.items()}
        return {
            "draining": self._is_draining,
            "announced": bool(states) and all(one["announced"] for one in states.values()),
            "empty": bool(states) and all(one["empty"] for one in states.values()),
            "engines": states,
        }


def label_of(url: str) -> str:
    """Host and port of an engine, as its instance ids begin."""
    return urlsplit(url).netloc.rpartition("@")[2]
