"""One port, several router processes: starts them, restarts those that die, ends them together.

Each is a whole router with an event loop of its own; they share the port by SO_REUSEPORT and meet
in Redis, as routers on different machines do. The supervisor serves nothing itself. A process whose
supervisor is gone sees the end of its standard input, and drains.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from router.config import RouterConfig

log = structlog.get_logger()

RESTART_AFTER_MIN_S: Final = 0.5
RESTART_AFTER_MAX_S: Final = 30.0
"""Doubled with each death of a place's process, until one has lived for `STEADY_S`."""

STEADY_S: Final = 60.0
START_FAILED_S: Final = 15.0
"""A first process that ends itself with an error so soon will do so again: what it says has to be
read and changed."""

KILL_AFTER_S: Final = 10.0
"""Beyond the time that a drain may take."""


@dataclass(slots=True)
class Place:
    """One of the processes, whichever runs there at the time.

    Attributes:
        number: from 0.
        restarts: processes that have died here.
        process: the present one, if there is one.
        limit: of its life; open until it shall end.
    """

    number: int
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    limit: asyncio.Timeout | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send it on to whoever runs here."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    """Runs `config.processes` routers until a signal.

    Args:
        config: of all of them.
        args: command line from which the configuration was read.
    """

    def __init__(self, config: RouterConfig, args: Sequence[str]) -> None:
        self._config = config
        self._args = args
        self._places = [Place(number) for number in range(config.processes)]
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Serve; exit code 0 after a signal and an orderly drain of all.

        Raises:
            SystemExit: the port is not to be had.
        """
        with _reserved(self._config.host, self._config.port) as held:
            port = held.getsockname()[1]
            self._take_signals()
            log.info("supervisor_started", processes=len(self._places), port=port)
            async with asyncio.TaskGroup() as tasks:
                for place in self._places:
                    tasks.create_task(self._keep(place, port), name=f"process-{place.number}")
        log.info("supervisor_stopped", exit_code=self._exit_code)
        return self._exit_code

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        for place in self._places:
            place.signal(signal.SIGHUP)

    def _stop(self) -> None:
        """The first begins the drain of all, the second cuts it short: each is sent on."""
        if not self._stopping.is_set():
            log.info("drain_started", processes=len(self._places))
        self._stopping.set()
        for place in self._places:
            self._end(place)

    async def _keep(self, place: Place, port: int) -> None:
        """Always a process in this place, until all stop."""
        delay_s = RESTART_AFTER_MIN_S
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started_s = loop.time()
            code = await self._live(place, port)
            lived_s = loop.time() - started_s
            if self._stopping.is_set():
                self._exit_code = self._exit_code or code
                return
            if not place.restarts and code > 0 and lived_s < START_FAILED_S:
                log.error("process_start_failed", process=place.number, exit_code=code)
                self._exit_code = code
                self._stop()
                return
            place.restarts += 1
            delay_s = RESTART_AFTER_MIN_S if lived_s > STEADY_S else delay_s
            log.error(
                "process_died",
                process=place.number,
                exit_code=code,
                lived_s=round(lived_s, 3),
                restarts=place.restarts,
                restart_after_s=delay_s,
            )
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                delay_s = min(2 * delay_s, RESTART_AFTER_MAX_S)

    async def _live(self, place: Place, port: int) -> int:
        """Start a process and wait for its end; its exit code, or minus the signal's number."""
        try:
            place.process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router", *self._args, *self._own_options(place, port)),
                stdin=asyncio.subprocess.PIPE,  # whose end tells that this process is gone
                start_new_session=True,  # a terminal's Ctrl-C comes from here, and once
            )
        except OSError as error:  # no memory, no further process: the others go on meanwhile
            log.warning("process_not_started", process=place.number, error=repr(error))
            return os.EX_OSERR
        log.info("process_started", process=place.number, pid=process.pid, restarts=place.restarts)
        try:
            async with asyncio.timeout(None) as place.limit:
                if self._stopping.is_set():  # the signal came while it was being started
                    self._end(place)
                return await process.wait()
        except TimeoutError:
            log.warning("process_killed", process=place.number, reason="its drain did not end")
            process.kill()
            return await process.wait()
        finally:
            place.limit = None

    def _end(self, place: Place) -> None:
        """Let it drain, in a time that is bounded."""
        place.signal(signal.SIGTERM)
        config = self._config
        limit_s = config.drain_notice_s + config.drain_deadline_s + KILL_AFTER_S
        if place.limit is not None and place.limit.when() is None:
            place.limit.reschedule(asyncio.get_running_loop().time() + limit_s)

    def _own_options(self, place: Place, port: int) -> list[str]:
        """Behind those of the command line, so these hold."""
        options = {
            "processes": 1,
            "process_number": place.number,
            "process_restarts": place.restarts,
            "reuse_port": "true",
            "port": port,
        }
        admin_port = self._config.admin_port
        if admin_port:
            options["admin_port"] = admin_port + place.number
        return [f"--{key}={value}" for key, value in options.items()]


def _reserved(host: str, port: int) -> socket.socket:
    """The port, bound and not listened on: it stays ours while no process is there.

    Raises:
        SystemExit: it is not to be had.
    """
    try:
        # An int of its own class, as the configuration's are, is refused by getaddrinfo.
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        family, kind, _, _, address = found[0]
        held = socket.socket(family, kind)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except OSError:
            held.close()
            raise
    except OSError as error:
        raise SystemExit(f"port: cannot listen on {host}:{port}: {error.strerror}") from error
    return held
