"""One process of the fleet: started on a leash, logged to a file, watched, stopped, restarted."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.errors import PartCrashError

LEASH = Path(__file__).with_name("leash.py")
TAIL_LINES = 15
TAIL_BYTES = 8_192
KILL_WAIT_S = 5.0


@dataclass(slots=True, kw_only=True)
class Part:
    """A process of the fleet.

    Attributes:
        name: as reports and log files call it, for example `router-1`.
        command: program and arguments.
        log_path: receives stdout and stderr.
        environment: variables on top of those of this process.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _stopped: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id; the part has been started."""
        assert self._process is not None, self.name
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or when it was never started."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process in a session of its own, so that a terminal's Ctrl-C misses it.

        A part stopped before its turn to start stays down.
        """
        if self._stopping:
            return
        leash = [sys.executable, "-I", str(LEASH), str(os.getpid())]
        with self.log_path.open("ab" if self._process else "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *leash,
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    async def watch(self) -> None:
        """Return when the part ended because it was stopped.

        Raises:
            PartCrashError: it ended by itself.
        """
        process = self._process
        assert process is not None, self.name
        exit_code = await process.wait()
        if process is not self._stopped:
            ended = f"exit code {exit_code}"
            if exit_code < 0:
                ended = f"signal {signal.Signals(-exit_code).name}"
            raise PartCrashError(f"{self.name} ended unexpectedly ({ended})\n{self.tail()}")

    async def stop(self, grace_s: float) -> None:
        """Ask the part to end and insist after the grace."""
        self._intend_end()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._ended()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(KILL_WAIT_S):
                await self._ended()

    def kill(self) -> None:
        """End the part at once."""
        self._intend_end()
        self._signal(signal.SIGKILL)

    async def killed(self) -> None:
        """End the part at once, and return when it has ended."""
        self.kill()
        async with asyncio.timeout(KILL_WAIT_S):
            await self._ended()

    async def restart(self) -> None:
        """Start a part again that was stopped or killed, with the same command and log.

        Whoever watches parts has to watch the new process: `watch` returned with the old one.
        """
        async with asyncio.timeout(KILL_WAIT_S):
            await self._ended()
        self._stopping = False
        await self.start()

    def pause(self) -> None:
        """Let the process stand still, its connections open, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def tail(self) -> str:
        """Return the last lines of its log, indented, under the log's path."""
        raw = self.log_path.read_bytes()[-TAIL_BYTES:] if self.log_path.exists() else b""
        lines = raw.decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"  {self.log_path}:", *(f"  | {line}" for line in lines)])

    def _intend_end(self) -> None:
        self._stopping = True
        self._stopped = self._process

    async def _ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
