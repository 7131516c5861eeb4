"""A router under load in front of engines, and a Redis that goes away in one way or another."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
from builders import make_fleet_record, make_heartbeat, make_instance
from fleets import chain, reserved, store
from redis_servers import RedisServer, redis_server
from router_edge import PROMPT, Edge, FakeEngine, completion, edge, stream_all
from waiting import until, until_equal

from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.records import EngineCounters, FleetRecord

DEADLINE_S = 0.25
EVERY_S = 0.02
HEARTBEAT_S = 0.1
IDLE = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0)


@dataclass
class LateProxy:
    """Passes bytes between a router and Redis; answers may come late, in order.

    Attributes:
        server: who answers.
        late_s: for each piece of an answer, by its number: how late it is passed on.
    """

    server: RedisServer
    late_s: Callable[[int], float] = lambda _: 0.0
    port: int = 0
    count: int = 0

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each piece is due a while after it came, and none overtakes another."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            while data := await reader.read(65536):
                self.count += 1
                due.put_nowait((time.monotonic() + self.late_s(self.count), data))
            due.put_nowait((0.0, b""))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                due_s, data = await due.get()
                if not data:
                    return
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ExceptionGroup):
            there_reader, there_writer = await asyncio.open_connection(
                "127.0.0.1", self.server.port
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._answers(there_reader, writer))
                await self._pump(reader, there_writer)
                there_writer.close()
        writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["LateProxy"]:
        """Listen on a free port."""
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with listener:
            self.port = listener.sockets[0].getsockname()[1]
            yield self
            listener.close()


@dataclass(frozen=True)
class Served:
    """One request as its client saw it.

    Attributes:
        took_s: without the time in which this process got no turn.
    """

    begun_s: float
    took_s: float
    status: int
    decision: dict[str, Any]


@dataclass
class Outage:
    """The parts of one test."""

    server: RedisServer
    proxy: LateProxy
    edge: Edge
    engines: list[FakeEngine]
    served: list[Served] = field(default_factory=list)
    loading: asyncio.Task[None] | None = None
    starved_s: float = 0.0

    async def ask(self) -> None:
        """One request."""
        begun_s, starved_s = time.monotonic(), self.starved_s
        headers = {"x-timestable-explain": "1"}
        async with self.edge.client.post(
            "/v1/completions", json=completion(), headers=headers
        ) as answer:
            await answer.read()
        took_s = time.monotonic() - begun_s - (self.starved_s - starved_s)
        decision = json.loads(answer.headers.get("x-timestable-decision", "{}"))
        self.served.append(Served(begun_s, took_s, answer.status, decision))

    async def load(self) -> None:
        """Requests at fixed times, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self.ask())
                due_s = time.monotonic() + EVERY_S
                await asyncio.sleep(EVERY_S)
                self.starved_s += time.monotonic() - due_s

    async def ready(self) -> dict[str, Any]:
        """What the router says of itself."""
        async with self.edge.client.get("/ready") as answer:
            return {"http_status": answer.status, **await answer.json()}

    async def is_ready(self) -> bool:
        """Whether it says so."""
        return bool((await self.ready())["http_status"] == 200)

    def since(self, begun_s: float, ended_s: float = float("inf")) -> list[Served]:
        """Requests that began in this time."""
        return [one for one in self.served if begun_s <= one.begun_s < ended_s]

    async def recovered_s(self) -> float:
        """Seconds until the router says that it is undegraded, and requests are so."""
        began_s = time.monotonic()

        async def undegraded() -> bool:
            if (await self.ready())["degraded"] or not self.served:
                return False
            return not self.served[-1].decision["degraded"]

        await until(undegraded, "undegraded")
        return time.monotonic() - began_s

    async def zero(self) -> None:
        """No more requests: every counter is zero once they have ended."""
        if self.loading is not None:
            self.loading.cancel()
        await self.edge.settled()
        async with self.server.client() as client:
            await until_equal([(0, 0)] * 2, lambda: reserved(client, self.edge.fleet))


async def keep_alive(server: RedisServer, engines: list[FakeEngine]) -> None:
    """As sidecars do: heartbeats, and joining anew where Redis has lost the fleet."""
    epoch, joined = 7, {index: (index, 1) for index in range(len(engines))}
    client = server.client()
    async with client:
        while True:
            with contextlib.suppress(*REDIS_WEATHER):
                for index, engine in enumerate(engines):
                    fleet = make_fleet_record(epoch=epoch)
                    beat = make_heartbeat(fleet, *joined[index], counters=IDLE)  # type: ignore[arg-type]  # NewType
                    if not await functions.run(client, beat):
                        epoch = 8
                        joined[index] = await _join(client, make_fleet_record(epoch=8), engine)
            await asyncio.sleep(HEARTBEAT_S)


async def _join(
    client: redis.asyncio.Redis, fleet: FleetRecord, engine: FakeEngine
) -> tuple[int, int]:
    await functions.run(client, fleet_functions.create(fleet))
    one = make_instance(engine.name, url=engine.url, model_root="/nonexistent")
    slot, generation = await functions.run(
        client, fleet_functions.join(fleet.fleet_id, one.encode())
    )
    await functions.run(client, index_functions.open_slot(fleet, slot, generation))
    await client.sadd(keys.directory(), fleet.fleet_id)
    return slot, generation


@asynccontextmanager
async def outage(tmp_path: Path) -> AsyncIterator[Outage]:
    """Two engines, of which the first holds the prompt, a router and requests all the time."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path / "redis"))
        await until(server.answers, "Redis answers")
        proxy = await stack.enter_async_context(LateProxy(server).serving())
        client = await stack.enter_async_context(server.client())
        engines = [FakeEngine(name, stream_all) for name in "ab"]
        one = await stack.enter_async_context(
            edge(
                client,
                tmp_path,
                *engines,
                redis_url=f"redis://127.0.0.1:{proxy.port}",
                index_deadline_s=DEADLINE_S,
            )
        )
        await store(client, one.fleet, 0, chain(one.fleet, PROMPT)[:3])
        parts = Outage(server=server, proxy=proxy, edge=one, engines=engines)
        async with asyncio.TaskGroup() as tasks:
            alive = tasks.create_task(keep_alive(server, engines))
            parts.loading = tasks.create_task(parts.load())
            try:
                await until(parts.is_ready, "ready")
                await until(lambda: len(parts.served) > 5, "requests are served")
                yield parts
            finally:
                if server.process is not None and server.process.poll() is None:
                    server.process.send_signal(signal.SIGCONT)
                alive.cancel()
                parts.loading.cancel()
