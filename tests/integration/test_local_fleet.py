"""The local fleet as people start it: it serves, and leaves nothing behind, however it ends."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from processes import children, exists

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
READY_S = 60
GONE_S = 20


def command_line(pid: int) -> list[str]:
    """Program and arguments of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def all_gone(pids: set[int]) -> bool:
    """Whether these processes end within the deadline."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GONE_S):
            while True:
                if not any(map(exists, pids)):
                    return True
                await asyncio.sleep(0.05)
    return False


@dataclass(slots=True)
class Command:
    """`python -m deploy.local` and what it said so far."""

    process: asyncio.subprocess.Process
    said: str = ""

    async def wait_for(self, pattern: str) -> re.Match[str]:
        """Read on until the pattern is there."""
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_S):
            while not (found := re.search(pattern, self.said)):
                chunk = await self.process.stdout.read(4096)
                assert chunk, f"ended without {pattern!r}:\n{self.said}"
                self.said += chunk.decode()
        return found

    async def end(self) -> int:
        """Read to the end; the exit code."""
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_S):
            self.said += (await self.process.stdout.read()).decode()
            return await self.process.wait()


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Command]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a small fleet on ports away from the usual ones; kills it at the end."""

    @asynccontextmanager
    async def _start(*options: str) -> AsyncIterator[Command]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.local", "--workers=1", "--routers=2"),
            *("--redis_port=16390", "--router_port=18000", "--admin_port=18001"),
            *("--engine_port=18100", "--event_port=15600", "--metrics_port=19100"),
            f"--run_dir={tmp_path / 'run'}",
            *options,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        command = Command(process)
        try:
            yield command
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return _start


async def streamed_text(url: str, body: str) -> str:
    """The text of a streamed chat answer."""
    text = ""
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as response,
    ):
        response.raise_for_status()
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                for choice in json.loads(data)["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


async def test_the_printed_curl_line_works_and_ctrl_c_drains_and_stops(start: Start) -> None:
    """What a person is told to try works; Ctrl-C ends with exit code 0 and nothing running."""
    async with start() as command:
        curl = await command.wait_for(r"curl -N (\S+) .*\n +-d '(.*)'")
        text = await streamed_text(curl[1], curl[2])
        parts = children(command.process.pid)
        command.process.send_signal(signal.SIGINT)
        exit_code = await command.end()
        assert (exit_code, len(parts), await all_gone(parts), text != "") == (0, 5, True, True)


async def test_a_crash_of_one_part_ends_all_and_names_it(start: Start) -> None:
    """A fleet with a hole is not kept: it ends with exit code 1 and says which part went."""
    async with start() as command:
        await command.wait_for("Ctrl-C drains")
        parts = children(command.process.pid)
        victim = next(pid for pid in parts if "workers" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        exit_code = await command.end()
        gone = await all_gone(parts)
    assert (exit_code, gone) == (1, True)
    assert "worker-1 ended unexpectedly (signal SIGKILL)" in command.said


@pytest.mark.skipif(sys.platform != "linux", reason="the leash holds on Linux only")
async def test_a_killed_parent_leaves_nothing_behind(start: Start) -> None:
    """SIGKILL cannot be handled, and still every part goes."""
    async with start() as command:
        await command.wait_for("Ctrl-C drains")
        parts = children(command.process.pid)
        command.process.kill()
        await command.end()
        assert (len(parts), await all_gone(parts)) == (5, True)


async def test_a_taken_port_is_told_and_avoided(start: Start) -> None:
    """Somebody else's server on the expected port is no obstacle."""
    with socket.create_server(("127.0.0.1", 18000)):
        async with start() as command:
            told = await command.wait_for(r"port 18000 is taken, using (\d+)")
            await command.wait_for(rf"curl -N http://127.0.0.1:{told[1]}/v1/chat/completions")


async def test_a_part_that_cannot_start_is_named_with_its_log(start: Start) -> None:
    """A bad option of a part shows up as that part's own message."""
    async with start("--block_size_tokens=4") as command:
        exit_code = await command.end()
    assert exit_code == 1
    assert re.search(r"(sidecar|worker)-1 ended unexpectedly \(exit code \d+\)", command.said)
    assert "block_size_tokens: 4" in command.said.split("ended unexpectedly")[1]
