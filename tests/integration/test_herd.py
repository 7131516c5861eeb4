"""Eight router processes place a herd of requests as one router process does.

A herd counts when its last bytes were sent within 20 ms. One that a busy machine sent more slowly
is discarded and sent anew, four times at most; then the test fails and says how long each took.

Requests ask for streams: their prefill ends with the first byte, which engines hold back, so that
no note of an ended prefill changes the counters in the middle of a herd.
"""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio
import redis.asyncio
from aiohttp import ClientSession, web
from builders import make_fleet_record, make_heartbeat, make_instance
from fleets import chain, read, reserved, store
from waiting import until, until_equal

from deploy.local import embedded_redis
from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.identifiers import SlotIndex
from indexer.contract.records import EngineCounters, FleetRecord

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
ROUTERS, INSTANCES, REQUESTS = 8, 16, 200
BURST_S = 0.020
ATTEMPTS = 4
PROMPT_TOKENS = 2_048
DEADLINE_S = 20.0
START_DEADLINE_S = 60.0  # of eight processes, each of which computes for two seconds
RENEW_S = 0.5


@dataclass
class Engines:
    """Instances on a port each, whose answers wait until they are let go."""

    preloads: list[int] = field(default_factory=lambda: [0] * INSTANCES)
    held: Counter[int] = field(default_factory=Counter)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    ports: list[int] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        for _ in range(INSTANCES):
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.ports = [address[1] for address in self._runner.addresses]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        slot = self.ports.index(request.transport.get_extra_info("sockname")[1])
        await request.read()
        self.held[slot] += 1
        await self.let_go.wait()
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})


@dataclass(kw_only=True)
class Herd:
    """The fleet of a module of tests, and its routers."""

    client: redis.asyncio.Redis
    fleet: FleetRecord
    engines: Engines
    ports: Sequence[int]

    async def beat(self, *, counters: bool) -> None:
        """Renew every lease; with counters, say also what each engine runs."""
        for slot in range(INSTANCES):
            running = self.engines.preloads[slot]
            told = EngineCounters(running_count=running, waiting_count=0, kv_usage_ratio=0.1)
            call = make_heartbeat(
                self.fleet, SlotIndex(slot), 1, counters=told if counters else None
            )
            assert await functions.run(self.client, call)

    async def renew(self) -> None:
        """Keep the leases, until cancelled."""
        while True:
            await self.beat(counters=False)
            await asyncio.sleep(RENEW_S)

    async def preload(self, counts: Sequence[int]) -> None:
        """Let engines report requests that nobody has reserved."""
        self.engines.preloads = list(counts)
        for _ in range(2):  # the first takes the peak of the last herd away
            await self.beat(counters=True)
        foreign = (await read(self.client, self.fleet)).slots["foreign_requests"]
        assert foreign.tolist()[:INSTANCES] == list(counts)

    async def burst(self, routers: int, prompt: Sequence[int], name: str) -> list[int]:
        """Let the herd loose on so many routers; how many requests each instance got.

        A herd that a busy machine did not send in time does not count.
        """
        took_ms = []
        for attempt in range(ATTEMPTS):
            took_s, counts = await self._burst(routers, prompt, f"{name}-{attempt}")
            if took_s <= BURST_S:
                return counts
            took_ms.append(round(took_s * 1000))
        raise AssertionError(
            f"No herd of {REQUESTS} was sent within {BURST_S * 1000:.0f} ms: it took {took_ms} ms."
        )

    async def _burst(
        self, routers: int, prompt: Sequence[int], name: str
    ) -> tuple[float, list[int]]:
        self.engines.held.clear()
        self.engines.let_go.clear()
        took_s, answers = await self._sent(self.ports[:routers], prompt, name)
        try:
            await until(
                lambda: self.engines.held.total() == REQUESTS, "all have arrived", DEADLINE_S
            )
            booked = [requests for requests, _ in await reserved(self.client, self.fleet)]
            counts = [self.engines.held[slot] for slot in range(INSTANCES)]
            assert booked[:INSTANCES] == counts
        finally:
            self.engines.let_go.set()
        decisions = [_decision(await answer) for answer in answers]
        assert not any(decision["degraded"] for decision in decisions)
        await until_equal([(0, 0)] * INSTANCES, lambda: reserved(self.client, self.fleet))
        return took_s, counts

    async def _sent(
        self, ports: Sequence[int], prompt: Sequence[int], name: str
    ) -> tuple[float, list[asyncio.Future[bytes]]]:
        """Equal requests over these routers in turn: all but the last byte, then the last ones.

        Returns how long the last bytes took, and the answers.
        """
        asked = {"model": "m", "prompt": list(prompt), "max_tokens": 1, "stream": True}
        body = json.dumps(asked).encode()
        loop = asyncio.get_running_loop()
        connections = []
        for number in range(REQUESTS):
            connection = socket.create_connection(("127.0.0.1", ports[number % len(ports)]))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: herd\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                f"x-request-id: {name}-{number}\r\nx-timestable-explain: 1\r\n\r\n"
            )
            connection.setblocking(False)
            await loop.sock_sendall(connection, head.encode() + body[:-1])
            connections.append(connection)
        start_s = time.perf_counter()
        for connection in connections:
            connection.send(body[-1:])
        took_s = time.perf_counter() - start_s
        answers = [asyncio.ensure_future(_rest(connection)) for connection in connections]
        return took_s, answers


async def _rest(connection: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    pieces = []
    with connection:
        async with asyncio.timeout(DEADLINE_S):
            while piece := await loop.sock_recv(connection, 1 << 16):
                pieces.append(piece)
    return b"".join(pieces)


def _decision(answer: bytes) -> dict[str, Any]:
    head = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[0].startswith("HTTP/1.1 200"), answer
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
    decision: dict[str, Any] = json.loads(headers["x-timestable-decision"])
    return decision


@contextlib.asynccontextmanager
async def router_processes(
    redis_url: str, count: int, *options: str
) -> AsyncIterator[list[dict[str, int]]]:
    """Router processes, started at once: their ports by key."""
    command = [
        *("nice", "-n", "5"),  # so that routers at work do not hold up the rest of the herd
        *(sys.executable, "-m", "router", "--port", "0", "--admin_port", "0"),
        *("--redis_url", redis_url, "--index_deadline_s", "10", "--drain_notice_s", "0", *options),
    ]
    processes = [
        await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        for _ in range(count)
    ]
    drains: list[asyncio.Future[bytes]] = []
    try:
        ports: list[dict[str, int]] = []
        async with asyncio.timeout(START_DEADLINE_S):
            for process in processes:
                assert process.stdout is not None
                found: dict[str, int] = {}
                while len(found) < 2:
                    line = json.loads(await process.stdout.readline())
                    if line["event"] == "listening":
                        found[line["key"]] = line["port"]
                ports.append(found)
                # Nobody else reads what it says: a full pipe would stop it.
                drains.append(asyncio.ensure_future(process.stdout.read()))
        yield ports
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes), *drains)


async def sees_all(session: ClientSession, admin_port: int) -> bool:
    """Whether a router is ready and knows every instance."""
    async with session.get(f"http://127.0.0.1:{admin_port}/ready") as ready:
        if ready.status != 200:
            return False
    async with session.get(f"http://127.0.0.1:{admin_port}/fleet") as answer:
        fleets = (await answer.json())["fleets"]
    return [len(fleet["instances"]) for fleet in fleets] == [INSTANCES]


@contextlib.asynccontextmanager
async def herd_of(redis_socket: Path, *options: str) -> AsyncIterator[Herd]:
    """A fleet of its own on the embedded server, and router processes that know it."""
    async with (
        embedded_redis.client(f"unix://{redis_socket}") as client,
        Engines() as engines,
        asyncio.TaskGroup() as tasks,
    ):
        await client.flushall()
        fleet = make_fleet_record()
        await functions.run(client, fleet_functions.create(fleet))
        for number, port in enumerate(engines.ports):
            record = make_instance(f"i{number}", url=f"http://127.0.0.1:{port}")
            joined = fleet_functions.join(fleet.fleet_id, record.encode())
            slot, generation = await functions.run(client, joined)
            assert (slot, generation) == (number, 1)
            await functions.run(client, index_functions.open_slot(fleet, slot, generation))
        await client.sadd(keys.directory(), fleet.fleet_id)
        herd = Herd(client=client, fleet=fleet, engines=engines, ports=[])
        renewal = tasks.create_task(herd.renew())
        async with (
            router_processes(f"unix://{redis_socket}", ROUTERS, *options) as ports,
            ClientSession() as session,
        ):
            for one in ports:
                await until(
                    lambda one=one: sees_all(session, one["admin_port"]), "all seen", DEADLINE_S
                )
            herd.ports = [one["port"] for one in ports]
            yield herd
        renewal.cancel()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def herd(redis_socket: Path) -> AsyncIterator[Herd]:
    """One fleet and its routers for all tests of this file: starting them takes seconds."""
    async with herd_of(redis_socket) as one:
        yield one


def prompts(name: str) -> tuple[list[int], list[int]]:
    """Two prompts nobody has asked before, alike but for their tokens."""
    first = 1 + 2 * sorted(CASES).index(name)
    return [first] * PROMPT_TOKENS, [first + 1] * PROMPT_TOKENS


CASES = {
    "new": ([0] * INSTANCES, False),
    "half the fleet holds the prefix": ([0] * INSTANCES, True),
    "unequal start": ([3 * (slot % 5) for slot in range(INSTANCES)], False),
    "unequal start and prefixes": (list(range(INSTANCES)), True),
}


@pytest.mark.parametrize("case", sorted(CASES))
async def test_eight_routers_place_a_herd_as_one(herd: Herd, case: str) -> None:
    """200 equal requests within 20 ms: each instance gets as many as through one router, +-1."""
    preloads, half = CASES[case]
    placed = []
    for routers, prompt in zip((1, ROUTERS), prompts(case), strict=True):
        if half:
            for slot in range(0, INSTANCES, 2):
                await store(herd.client, herd.fleet, slot, chain(herd.fleet, prompt))
        await herd.preload(preloads)
        placed.append(await herd.burst(routers, prompt, case.replace(" ", "-")))
    one, many = placed
    assert max(abs(a - b) for a, b in zip(one, many, strict=True)) <= 1, placed


async def test_short_prompts_land_as_through_one(herd: Herd) -> None:
    """Without a full block there are neither hits nor siblings: the counters alone decide."""
    placed = []
    for routers in (1, ROUTERS):
        await herd.preload([0] * INSTANCES)
        placed.append(await herd.burst(routers, [5] * 10, "short"))
    assert {count for counts in placed for count in counts} == {12, 13}, placed
