"""A router process: options in, an exit code out."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import uvloop

from router import telemetry
from router.composition import Process, composed
from router.config import EXIT_USAGE, RouterConfig, loggable, parse_config
from router.door.api_keys import KeysInvalid
from router.door.certificates import CertificatesUnusable
from router.door.hash_key import hash_key
from router.draining import drain
from router.log_lines import set_up_logging
from router.processes import Supervisor
from router.recording.recorder import RecordingUnavailable
from router.tracing import TracesUnavailable

log = structlog.get_logger()

GARBAGE_SEARCHED_AFTER: Final = 10_000
"""More objects made than gone again; those of a hundred requests in flight are fewer."""

READY_LOOK_S: Final = 1.0


def main(args: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT; exit code 0 after an orderly drain."""
    args = sys.argv[1:] if args is None else args
    if list(args[:1]) == ["hash-key"]:
        return hash_key(sys.stdin, sys.stdout)
    config = parse_config(args)
    # A router uses one core: threads of the tokenizers library would wait for each other on it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lines = set_up_logging(config.log_level, config.log_format, config.process_number)
    # Requests leave no cycles behind: what searches for them would only find all that is in flight.
    gc.set_threshold(GARBAGE_SEARCHED_AFTER, *gc.get_threshold()[1:])
    try:
        if config.processes > 1:
            return uvloop.run(Supervisor(config, args).run())
        return uvloop.run(serve(config))
    except (KeysInvalid, CertificatesUnusable, TracesUnavailable, RecordingUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except Exception:
        log.exception("router_failed")
        return 1
    finally:
        lines.flush()


async def serve(config: RouterConfig) -> int:
    """Serve until a signal; a background task that fails ends the process with an error."""
    log.info("router_started", **loggable(config))
    signals = _Signals()
    if config.process_number is not None:
        telemetry.PROCESS_RESTARTS.labels(config.process_number).set(config.process_restarts)
        signals.end_with_stdin()
    async with composed(config) as process:
        signals.reload = process.reloading.ask
        _freeze_when_ready(process)
        await signals.first.wait()
        await drain(
            process.admission,
            process.listeners,
            signals.second,
            notice_s=config.drain_notice_s,
            deadline_s=config.drain_deadline_s,
        )
    log.info("router_stopped")
    return 0


def _freeze_when_ready(process: Process) -> None:
    """Have the collector leave alone what is there for good, tokenizers included.

    To search these objects, which are most of all, takes some 30 ms, and everybody waits.
    """
    if process.not_ready_reason() is None:
        gc.freeze()
    else:
        asyncio.get_running_loop().call_later(READY_LOOK_S, _freeze_when_ready, process)


class _Signals:
    """SIGTERM and SIGINT: the first begins the drain, the second cuts it short.

    SIGHUP calls `reload`, which is there as soon as there is something to reload.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)
        self.reload: Callable[[], None] = lambda: None
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        self.reload()

    def end_with_stdin(self) -> None:
        """Its end is as a signal: the supervisor is gone, and nobody else would send one."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if not os.read(0, 1):
                loop.remove_reader(0)
                self.first.set()

        loop.add_reader(0, look)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


if __name__ == "__main__":
    exit_code = main()
    gc.freeze()  # else the interpreter searches all there is for cycles before it ends
    sys.exit(exit_code)
