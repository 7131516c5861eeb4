"""Prove deploy/compose.yaml with a Docker engine: `make compose-check`.

Builds the image, brings the fleet up, streams a chat answer through the front port, doubles the
routers under load without losing a request, sees every Prometheus target up, and takes all down.
Without Docker it says SKIPPED and ends with exit code 0; it prints PASSED only when it has run.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from deploy.local import signals
from deploy.local.errors import FleetError
from deploy.local.ports import PortPicker

HOST = "127.0.0.1"
COMPOSE_FILE = Path(__file__).with_name("compose.yaml")
MODEL = "sim"
WORKERS = 3
ROUTERS_BEFORE, ROUTERS_AFTER = 2, 4
CLIENTS = 8
ANSWER_TOKENS = 24
LOAD_BEFORE_S = 3.0
BUILD_DEADLINE_S = 900.0
COMMAND_DEADLINE_S = 300.0
READY_DEADLINE_S = 120.0
REQUEST_DEADLINE_S = 60.0
POLL_S = 0.5
TARGETS_UP = "count by (job) (up == 1)"
ROUTERS_USED = "count by (job) (sum by (job, instance) (timestable_router_requests_total) > 0)"


class ComposeCheckError(FleetError):
    """The containers did not do what they have to."""


def say(line: str) -> None:
    """Tell a person, at once."""
    print(line, flush=True)


async def run(
    *command: str, deadline_s: float, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command and return its exit code and all its output.

    Raises:
        TimeoutError: it took longer than the deadline; it has been killed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


async def find_compose() -> list[str] | None:
    """Return the Compose command, v2 or 1.29; None with a reason said when there is none."""
    docker = shutil.which("docker")
    if docker is None or (await run(docker, "info", deadline_s=30))[0] != 0:
        say("SKIPPED: no Docker engine")
        return None
    if (await run(docker, "compose", "version", deadline_s=30))[0] == 0:
        return [docker, "compose"]
    if old := shutil.which("docker-compose"):
        return [old]
    say("SKIPPED: a Docker engine, but no Compose")
    return None


@dataclass(slots=True, kw_only=True)
class Containers:
    """The fleet in containers, under a project name of its own."""

    compose: Sequence[str]
    front_port: int
    prometheus_port: int

    @property
    def front_url(self) -> str:
        """Base URL of the load balancer."""
        return f"http://{HOST}:{self.front_port}"

    async def command(self, *words: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Run a Compose command and return its output.

        Raises:
            ComposeCheckError: it failed or took too long.
        """
        arguments = ("-p", f"timestable-check-{os.getpid()}", "-f", str(COMPOSE_FILE), *words)
        ports = {
            "TIMESTABLE_PORT": str(self.front_port),
            "TIMESTABLE_PROMETHEUS_PORT": str(self.prometheus_port),
        }
        try:
            code, output = await run(
                *self.compose, *arguments, deadline_s=deadline_s, environment=ports
            )
        except TimeoutError:
            raise ComposeCheckError(
                f"compose {' '.join(words)} took more than {deadline_s:g} s"
            ) from None
        if code != 0:
            tail = "\n".join(output.splitlines()[-30:])
            raise ComposeCheckError(f"compose {' '.join(words)} failed (exit code {code}):\n{tail}")
        return output

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Return when the front port leads to a router that sees all workers."""
        seen = "no answer"
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while True:
                    try:
                        async with session.get(f"{self.front_url}/fleet") as response:
                            body = await response.json(content_type=None)
                            fleets = body["fleets"] if response.status == 200 else []  # noqa: PLR2004 - HTTP
                            count = sum(len(fleet["instances"]) for fleet in fleets)
                            seen = f"status {response.status}, {count} instances"
                            if count == WORKERS:
                                return
                    except (aiohttp.ClientError, ValueError, TimeoutError) as error:
                        seen = repr(error)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ComposeCheckError(
                f"no fleet behind {self.front_url} after {READY_DEADLINE_S:g} s: {seen}"
            ) from None

    async def wait_query(
        self, session: aiohttp.ClientSession, query: str, expected: dict[str, int]
    ) -> None:
        """Return when a Prometheus query by job has these values."""
        url = f"http://{HOST}:{self.prometheus_port}/api/v1/query"
        found: dict[str, int] = {}
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while found != expected:
                    await asyncio.sleep(POLL_S)
                    try:
                        async with session.get(url, params={"query": query}) as response:
                            rows = (await response.json())["data"]["result"]
                    except (aiohttp.ClientError, TimeoutError):
                        continue
                    found = {row["metric"]["job"]: int(row["value"][1]) for row in rows}
        except TimeoutError:
            raise ComposeCheckError(f"Prometheus: {query} is {found}, not {expected}") from None


async def stream_chat(session: aiohttp.ClientSession, url: str, prompt: str) -> None:
    """Stream one chat answer and check that it is whole.

    Raises:
        ComposeCheckError: a refusal, a cut or a short answer.
    """
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": prompt}],
    }
    chunks = 0
    finished = False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:  # noqa: PLR2004 - HTTP
                raise ComposeCheckError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    finished = True
                elif data:
                    choices = json.loads(data).get("choices") or [{}]
                    chunks += bool(choices[0].get("delta", {}).get("content"))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ComposeCheckError(f"after {chunks} chunks: {error!r}") from error
    if not finished or chunks == 0:
        raise ComposeCheckError(f"a stream ended after {chunks} chunks without its end mark")


@dataclass(slots=True)
class Load:
    """Clients that ask again and again until told to stop."""

    session: aiohttp.ClientSession
    url: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    stopping: bool = False

    async def client(self, number: int) -> None:
        """Ask, one request after the other."""
        turn = 0
        while not self.stopping:
            turn += 1
            prompt = f"client {number} of {CLIENTS}, turn {turn}. " * 20
            try:
                await stream_chat(self.session, self.url, prompt)
                self.answered += 1
            except ComposeCheckError as failure:
                self.failures.append(str(failure))


async def scale_under_load(containers: Containers, session: aiohttp.ClientSession) -> None:
    """Double the routers while clients ask: all routers get work, every request an answer."""
    load = Load(session, containers.front_url)
    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(load.client(number))
        try:
            await asyncio.sleep(LOAD_BEFORE_S)
            scale = f"router={ROUTERS_AFTER}"
            await containers.command("up", "-d", "--no-recreate", "--scale", scale)
            await containers.wait_query(session, TARGETS_UP, targets(ROUTERS_AFTER))
            await containers.wait_query(session, ROUTERS_USED, {"router": ROUTERS_AFTER})
        finally:
            load.stopping = True
    if load.failures:
        raise ComposeCheckError(
            f"{len(load.failures)} of {load.answered + len(load.failures)} requests were lost "
            f"while scaling, for example: {load.failures[0]}"
        )
    say(f"  {ROUTERS_BEFORE} -> {ROUTERS_AFTER} routers: {load.answered} answered, 0 lost")


def targets(routers: int) -> dict[str, int]:
    """Prometheus targets by job that have to be up."""
    return {"router": routers, "sidecar": WORKERS, "engine": WORKERS}


async def check(containers: Containers) -> None:
    """Go through every step; the containers are gone at the end, however it ends.

    Raises:
        ComposeCheckError: a step failed.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
    try:
        say("building")
        await containers.command("build", deadline_s=BUILD_DEADLINE_S)
        say("starting")
        await containers.command("up", "-d", "--scale", f"router={ROUTERS_BEFORE}")
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await containers.wait_ready(session)
            await containers.wait_query(session, TARGETS_UP, targets(ROUTERS_BEFORE))
            say("  all Prometheus targets are up")
            await stream_chat(session, containers.front_url, "Hello")
            say("  a chat answer streamed through the front port")
            await scale_under_load(containers, session)
    except ComposeCheckError:
        say(await containers.command("logs", "--tail=15"))
        raise
    finally:
        say("stopping")
        await containers.command("down", "--volumes", "--remove-orphans")


async def compose_check() -> int:
    """Run the check where it can be run."""
    started_s = time.monotonic()
    compose = await find_compose()
    if compose is None:
        return 0
    ports = PortPicker(host=HOST)
    containers = Containers(
        compose=compose, front_port=ports.pick(8000), prometheus_port=ports.pick(9090)
    )
    try:
        await check(containers)
    except ComposeCheckError as failure:
        say(f"FAILED: {failure}")
        return 1
    say(f"PASSED in {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(signals.run(compose_check))
