"""The books balance through any weather: real ledgers, a real server, faults in between."""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from builders import make_fleet_record, make_heartbeat, make_instance
from decision_core import RouterCore
from fault_link import EVENTS_KEPT, Fault, FaultLink, pick
from fleets import found_fleet, read
from random_clients import BLOCKS, Clients
from redis_servers import RedisServer, redis_server
from waiting import until, until_equal

from indexer.contract import audit, fleet_functions, functions, index_functions, keys
from indexer.contract.call import Call
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import SlotIndex
from indexer.contract.link import Link, connected
from router import leases
from router.notes import NoteQueue

pytestmark = pytest.mark.integration

ROUTERS, CLIENTS_PER_ROUTER = 3, 6
FAULTY_S = 6.0
FAULT_RATIO = 0.12
DEADLINE_S = 0.1
SYNC_EVERY_S = 2.0
"""So that what only a regular sync sets right is set right within a test's time."""

NOTES_MAX = 8
"""So that notes are dropped now and then, and only a sync says what they would have."""

NAMES = ("a", "b", "c")


class Sidecars:
    """Keep the instances of the fleet alive, and found it again when Redis has lost it."""

    def __init__(self, client: redis.asyncio.Redis, rng: np.random.Generator) -> None:
        self._client = client
        self._rng = rng
        self.busy = asyncio.Lock()
        self._epoch = 0
        self._places: dict[str, tuple[SlotIndex, int]] = {}
        self.fleet = make_fleet_record()

    async def found(self) -> None:
        """Nothing but this fleet, and all instances in it."""
        await self._client.flushall()
        self._epoch += 1
        self.fleet = await found_fleet(self._client, NAMES, epoch=self._epoch)
        await self._client.expire(keys.directory(), 600)
        self._places = {name: (SlotIndex(slot), 1) for slot, name in enumerate(NAMES)}

    async def run(self) -> None:
        """Heartbeats that tell of stored blocks, until cancelled."""
        while True:
            with contextlib.suppress(*REDIS_WEATHER):
                async with asyncio.timeout(2.0), self.busy:
                    await self._beat()
            await asyncio.sleep(0.1)

    async def _beat(self) -> None:
        for slot, generation in self._places.values():
            stored = [b for b in BLOCKS if self._rng.random() < 0.3]
            beat = make_heartbeat(self.fleet, slot, generation, counters=None, stored=stored)
            if not await functions.run(self._client, beat):
                await self.found()
                return

    async def rejoin(self, name: str) -> None:
        """An instance leaves, and comes back as another generation."""
        async with self.busy:
            await self._beat()  # it may just have been lost
            fleet, place = self.fleet, self._places[name]
            for call in (
                fleet_functions.close(fleet.fleet_id, *place, -1),
                fleet_functions.free(fleet.fleet_id, *place),
            ):
                await functions.run(self._client, call)
            record = make_instance(name, models=[fleet.model_scope]).encode()
            slot, generation = await functions.run(
                self._client, fleet_functions.join(fleet.fleet_id, record)
            )
            await functions.run(self._client, index_functions.open_slot(fleet, slot, generation))
            self._places[name] = slot, generation


@dataclass
class Incarnation:
    """A router process, as far as it matters here."""

    core: RouterCore
    link: FaultLink
    clients: Clients
    ledger: asyncio.Task[None]
    tasks: list[asyncio.Task[None]]
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def end(self) -> None:
        """Its tasks end, the ledger with a farewell; after `cut` nobody hears it."""
        self.clients.ended.set()
        for task in (*self.tasks, self.ledger):
            task.cancel()
        done, _ = await asyncio.wait([*self.tasks, self.ledger])
        await self.stack.aclose()
        for task in done:  # nothing that happens here may end a task
            assert task.cancelled() or task.exception() is None, task.exception()


class Weather:
    """Routers, and what befalls them."""

    def __init__(self, server: RedisServer, links: list[Link], seed: int) -> None:
        self.seed = seed
        self.server = server
        self.links = links
        self.client = server.client()
        self.sidecars = Sidecars(self.client, np.random.default_rng([seed, 1]))
        self.rng = np.random.default_rng([seed, 2])
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.routers: list[Incarnation] = []
        self.faults: Counter[Fault] = Counter()
        self.counts: Counter[str] = Counter()
        self.born = 0

    async def start_router(self, place: int) -> Incarnation:
        """A new process on the link of a place."""
        self.born += 1
        name = f"r{place}.{self.born}"
        rng = np.random.default_rng([self.seed, 3, place, self.born])
        link = FaultLink(self.links[place], rng, name=name, events=self.events)
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(link.running())
        core = RouterCore(link, deadline_s=DEADLINE_S)
        core.ledger._notes = NoteQueue(NOTES_MAX)
        clients = Clients(rng)
        with contextlib.suppress(*REDIS_WEATHER):
            await core.index.refresh()
        link.fault_ratio = FAULT_RATIO
        ledger = asyncio.ensure_future(core.ledger.run())
        tasks = [asyncio.ensure_future(clients.run(core)) for _ in range(CLIENTS_PER_ROUTER)]
        return Incarnation(core, link, clients, ledger, tasks, stack)

    async def befall(self) -> None:
        """Until the time is up: one misfortune after the other, and the audit after each."""
        script = ["kill", "kill", "pause", "jump", "jump", "rejoin", "flush", "farewell", "restart"]
        self.rng.shuffle(script)
        end_s = time.monotonic() + FAULTY_S
        for what in script:
            self.events.append(f"-- {what}")
            await getattr(self, what)()
            await self.check()
            await asyncio.sleep(self.rng.uniform(0.2, 0.7))
        while time.monotonic() < end_s:
            await self.check()
            await asyncio.sleep(0.1)

    async def check(self) -> audit.Audit:
        """The books balance at any moment: each function does all of a change or nothing."""
        books = audit.audited(await self.ask(audit.audit(self.sidecars.fleet.fleet_id)))
        assert books.balances, books
        return books

    async def ask(self, call: Call) -> Any:
        """On a connection without faults."""
        return await functions.run(self.client, call)

    async def kill(self, *, farewell: bool = False) -> None:
        """As by kill -9: nobody is told, and whatever was under way arrives all the same."""
        place = int(self.rng.integers(ROUTERS))
        router = self.routers[place]
        if not farewell:
            router.link.cut()
        await router.end()
        self.note(router)
        self.routers[place] = await self.start_router(place)

    async def farewell(self) -> None:
        """A router is told to end."""
        await self.kill(farewell=True)

    async def pause(self) -> None:
        """A router is stopped for longer than its lease, and then goes on where it was."""
        router = pick(self.rng, self.routers)
        router.link.pause()
        await self.jump()
        await asyncio.sleep(self.rng.uniform(0.5, 1.3))
        router.link.resume()

    async def jump(self) -> None:
        """All leases are dead at once: whoever comes first reaps another."""
        await self.end_leases(set())

    async def end_leases(self, spared: set[bytes]) -> None:
        routers = keys.routers(self.sidecars.fleet.fleet_id)
        registered: list[Any] = await self.client.zrange(routers, 0, -1)
        for router_id in registered:
            if router_id not in spared:
                await self.client.zadd(routers, {router_id: 1.0}, xx=True)

    async def rejoin(self) -> None:
        await self.sidecars.rejoin(pick(self.rng, NAMES))

    async def flush(self) -> None:
        await self.client.flushall()

    async def restart(self) -> None:
        """Redis comes back empty, without functions."""
        async with self.sidecars.busy:  # so that nobody else is using this client
            self.server.kill()
            await asyncio.sleep(self.rng.uniform(0, 0.3))
            self.server.start()
            await until(self.server.answers, "Redis answers")
            await self.client.connection_pool.disconnect()

    def note(self, router: Incarnation) -> None:
        self.faults += router.link.counts
        self.counts += router.clients.counts

    async def calm(self) -> None:
        """No faults any more; all requests end."""
        self.events.append("-- calm")
        for router in self.routers:
            router.link.fault_ratio = 0.0
            router.clients.ended.set()
        for router in self.routers:
            await asyncio.wait(router.tasks)
        for router in self.routers:
            await until(router.link.is_idle, "nothing is under way")
        # Whoever lives has to set right what it left; only the dead are reaped.
        books = [book for r in self.routers for book in r.core.ledger._books.values()]
        await self.end_leases({book.router_id.encode() for book in books})

    async def standing(self) -> tuple[bool, int, int, int, int]:
        """What has to come to rest: all told, reservations, routers, the dead, clamped."""
        books = await self.check()
        told = all(router.core.ledger.settled() for router in self.routers)
        counts = books.reservations, books.routers, books.routers_dead, books.clamped_count
        return told, *counts

    async def leave(self) -> None:
        routers, self.routers = self.routers, []
        ends = await asyncio.gather(*(r.end() for r in routers), return_exceptions=True)
        for router, end in zip(routers, ends, strict=True):
            self.note(router)
            if end is not None:
                raise end


@contextlib.asynccontextmanager
async def weather(folder: Path, seed: int) -> AsyncIterator[Weather]:
    """Three routers with their clients on a server of their own; a failure tells what happened."""
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(redis_server(folder))
        await until(server.answers, "Redis answers")
        links = [await stack.enter_async_context(connected(server.url)) for _ in range(ROUTERS)]
        one = Weather(server, links, seed)
        await stack.enter_async_context(one.client)
        await one.sidecars.found()
        sidecars = asyncio.ensure_future(one.sidecars.run())
        one.routers = [await one.start_router(place) for place in range(ROUTERS)]
        try:
            yield one
        except BaseException:
            print(f"seed {seed}:", *one.events, sep="\n")  # noqa: T201 - pytest shows it
            raise
        finally:
            await one.leave()
            sidecars.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sidecars


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_books_come_to_zero_after_any_weather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Balanced all the time; after the last request nothing is reserved and nothing is left."""
    monkeypatch.setattr(leases, "SYNC_EVERY_S", SYNC_EVERY_S)
    async with weather(tmp_path / "redis", seed) as one:
        await one.befall()
        await one.calm()
        await until_equal((True, 0, ROUTERS, 0, 0), one.standing)
        fleet = one.sidecars.fleet
        slots = (await read(one.client, fleet)).slots
        assert not slots["reserved_requests"].any()
        assert not slots["reserved_prefill_tokens"].any()
        assert await audit.leftovers(one.links[0], [fleet.fleet_id]) == []

        await one.leave()
        assert await one.standing() == (True, 0, 0, 0, 0)
        assert set(one.faults) == set(Fault)
        assert one.counts["booked"] > 100
        assert one.counts["left"] > 20
