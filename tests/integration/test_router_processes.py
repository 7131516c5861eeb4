"""`--processes N`: one command, one port, N routers that are kept alive and end together."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from free_ports import consecutive_ports, free_ports
from processes import children, exists
from router_edge import CHUNKS, LAST_CHUNKS, FakeEngine, completion, edge, silent, stream_all
from waiting import until

from router.config import RouterConfig
from router.processes import Supervisor

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

ROOT = Path(__file__).parents[2]
START_S = 150.0
"""Importing alone takes three seconds of a core, which many may share."""
NAME = "timestable_router_process_restarts"


class Command:
    """The command, its log lines so far, and its ports."""

    def __init__(
        self, child: asyncio.subprocess.Process, port: int, admin_ports: list[int]
    ) -> None:
        self.child = child
        self.url = f"http://127.0.0.1:{port}"
        self.admin_urls = [f"http://127.0.0.1:{one}" for one in admin_ports]
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Collect lines until all processes have ended."""
        assert self.child.stdout is not None
        while line := await self.child.stdout.readline():
            self.lines.append(json.loads(line))

    def said(self, event: str) -> list[dict[str, Any]]:
        """Lines of an event."""
        return [line for line in self.lines if line["event"] == event]

    async def restarts(self, url: str) -> dict[str, float]:
        """Whose metrics these are, and how many died before it; nothing where nobody listens."""
        connector = aiohttp.TCPConnector(force_close=True)  # each connection may meet another one
        try:
            async with (
                aiohttp.ClientSession(connector=connector) as client,
                client.get(f"{url}/metrics") as answer,
            ):
                text = await answer.text()
        except aiohttp.ClientConnectionError:
            return {}
        lines = [line for line in text.splitlines() if line.startswith(NAME + "{")]
        return {line.split('"')[1]: float(line.split()[1]) for line in lines}

    async def all_are(self, *restarts: float) -> bool:
        """Whether each answers on its own admin port, and has been restarted so often."""
        told = [await self.restarts(url) for url in self.admin_urls]
        return told == [{str(number): count} for number, count in enumerate(restarts)]


@asynccontextmanager
async def command(redis_socket: Path, *args: str, processes: int = 2) -> AsyncIterator[Command]:
    """A running command; killed at the end, whereupon its processes end by themselves."""
    admin_port, (port,) = consecutive_ports(processes), free_ports(1)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--processes", str(processes), "--port", str(port)),
        *("--admin_port", str(admin_port), "--redis_url", f"unix://{redis_socket}", *args),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Command(child, port, [admin_port + number for number in range(processes)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.read())
        try:
            yield one
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def test_one_port_many_routers_kept_alive_and_ended_together(
    redis_client, redis_socket
) -> None:
    """All take connections; one that dies is replaced and counted; a drain loses nothing."""
    engine = FakeEngine("a", stream_all)
    options = ("--drain_notice_s", "0")
    async with (
        edge(redis_client, redis_socket, engine),
        command(redis_socket, *options) as one,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await until(lambda: one.all_are(0, 0), "both are there", START_S)
        seen: Counter[str] = Counter()

        async def has_met_both() -> bool:
            seen.update(await one.restarts(one.url))
            return len(seen) == 2

        await until(has_met_both, "the port leads to both", START_S)

        (killed,) = [line["pid"] for line in one.said("process_started") if line["process"] == 1]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: one.all_are(0, 1), "the dead one is replaced", START_S)
        (died,) = one.said("process_died")
        assert (died["process"], died["exit_code"], died["restarts"]) == (1, -9, 1)

        engine.script = silent
        asked = [
            tasks.create_task(client.post(f"{one.url}/v1/completions", json=completion()))
            for _ in range(8)
        ]
        await until(lambda: len(engine.bodies) == len(asked), "the engine has all", START_S)
        pids = children(one.child.pid)
        one.child.send_signal(signal.SIGTERM)
        await until(lambda: len(one.said("drain_started")) == 3, "all drain", START_S)
        engine.let_go.set()
        for answer in asked:
            assert await (await answer).read() == b"".join((*CHUNKS, *LAST_CHUNKS))
        async with asyncio.timeout(START_S):
            assert await one.child.wait() == 0
        assert not any(map(exists, pids))


async def test_processes_end_with_the_one_that_started_them(redis_socket) -> None:
    """Killed at once, it can tell nobody; they drain all the same."""
    async with command(redis_socket, "--drain_notice_s", "0") as one:
        await until(lambda: one.all_are(0, 0), "both are there", START_S)
        pids = children(one.child.pid)
        assert len(pids) == 2
        one.child.kill()
        await until(lambda: not any(map(exists, pids)), "nobody is left", START_S)
        assert len(one.said("drain_ended")) == 2


async def test_what_cannot_start_is_not_started_again(redis_socket) -> None:
    """One of the admin ports is taken: the command ends, and says which."""
    async with command(redis_socket) as one:
        number = one.admin_urls[1].rpartition(":")[2]
        with socket.create_server(("127.0.0.1", int(number))):
            async with asyncio.timeout(START_S):
                assert await one.child.wait() == 1
        assert [line["process"] for line in one.said("process_start_failed")] == [1]
        assert not one.said("process_died")


async def test_a_port_of_somebody_else_is_named() -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--processes", "2"),
            *("--port", str(taken.getsockname()[1])),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(START_S):
            _, errors = await child.communicate()
    assert child.returncode == 1
    assert errors.decode().startswith("port: cannot listen on 127.0.0.1:")


async def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without room for one more process may have it later; the others go on meanwhile."""
    command = tmp_path / "python"

    def runs(line: str) -> None:
        command.write_text(f"#!/bin/sh\n{line}\n")
        command.chmod(0o700)

    runs("kill -9 $$")
    monkeypatch.setattr(sys, "executable", str(command))
    supervisor = Supervisor(RouterConfig(port=0, processes=1), [])
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        place = supervisor._places[0]
        await until(lambda: place.restarts == 1, "it has died")
        command.unlink()
        await until(lambda: place.restarts == 2, "it could not be started")
        runs("exec sleep 60")
        await until(
            lambda: place.process is not None and place.process.returncode is None, "it is back"
        )
        supervisor._stop()
    assert running.result() == -signal.SIGTERM
