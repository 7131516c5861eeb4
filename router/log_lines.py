"""Log lines on standard output: what they look like, and when they are written."""

import asyncio
import json
import logging
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, TextIO

import structlog
from pydantic_core import to_json
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from router import telemetry
from router.config import LogFormat

HELD_MAX_S: Final = 0.1
HELD_LINES_MAX: Final = 512


class HeldLines:
    """Writes lines many at a time, in their order: a request's own write costs more than its line.

    Lines that only inform are held for `HELD_MAX_S` while an event loop runs; a warning and
    whatever is worse goes out at once, behind what is held. A process that is killed by a signal
    that cannot be caught loses what it holds. Lines that cannot be written are lost and counted:
    a full disk or a reader that has gone must not end a router. Threads may write, too.

    Args:
        out: where they go.
        write_bytes_max: of one write, where others write to the same pipe: it takes so many bytes
            whole, and only more may come between others' lines. None: nobody else does.
    """

    def __init__(self, out: TextIO, *, write_bytes_max: int | None = None) -> None:
        self._out = out
        self._write_bytes_max = write_bytes_max
        self._held: deque[str] = deque()
        self._writing = threading.Lock()
        self._due: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def info(self, line: str) -> None:
        """Write it soon."""
        self._held.append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread's, or before and after the loop: nobody would come back
            self.flush()
            return
        if len(self._held) >= HELD_LINES_MAX:
            self.flush()
        elif self._due is None or self._loop is not loop:
            self._loop = loop
            self._due = loop.call_later(HELD_MAX_S, self._fell_due)

    debug = info

    def warning(self, line: str) -> None:
        """Write it now."""
        self._held.append(line)
        self.flush()

    error = critical = warning

    def flush(self) -> None:
        """Write what is held."""
        with self._writing:
            lines = [self._held.popleft() for _ in range(len(self._held))]
            for some in self._at_a_time(lines):
                try:
                    self._out.write("\n".join(some) + "\n")
                    self._out.flush()
                except (OSError, ValueError):  # ValueError: it is closed
                    telemetry.LOG_LINES_LOST.inc(len(some))

    def _at_a_time(self, lines: list[str]) -> Iterator[list[str]]:
        """What goes out in one write."""
        if self._write_bytes_max is None:
            if lines:
                yield lines
            return
        some: list[str] = []
        some_bytes = 0
        for line in lines:
            line_bytes = len(line.encode(errors="surrogatepass")) + 1
            if some and some_bytes + line_bytes > self._write_bytes_max:
                yield some
                some, some_bytes = [], 0
            some.append(line)
            some_bytes += line_bytes
        if some:
            yield some

    def _fell_due(self) -> None:
        self._due = None
        self.flush()


def set_up_logging(
    level: str, line_format: LogFormat = "json", process_number: int | None = None
) -> HeldLines:
    """Lines on stdout, from this level on: JSON, or text for a person at a terminal.

    Args:
        level: the lowest one that is written.
        line_format: of each line.
        process_number: in every line, where several processes write to one place.

    Returns:
        What has to be flushed before the process ends.
    """
    # A frame's locals are headers with credentials, prompts and the password of Redis.
    rendered: list[Processor] = [
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(serializer=_json_line),
    ]
    if line_format == "console":
        plain = structlog.dev.plain_traceback
        colors = sys.stdout.isatty()
        rendered = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    numbered = [] if process_number is None else [_numbered(process_number)]
    alone = process_number is None
    lines = HeldLines(sys.stdout, write_bytes_max=None if alone else select.PIPE_BUF)
    structlog.configure(
        processors=[
            _unfolded,
            *numbered,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    # Malformed HTTP is answered with a 400; aiohttp would add a traceback of many lines to each.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    return lines


def _unfolded(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """A long line comes as one dictionary: its fields as arguments would be copied three times."""
    fields = event.pop("fields", None)
    if fields is not None:
        event.update(fields)
    return event


def _numbered(process_number: int) -> Processor:
    def numbered(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["process"] = process_number
        return event

    return numbered


def _json_line(event: dict[str, Any], **how: Any) -> str:
    """As `json.dumps` in a third of its time; a number that JSON does not have is null."""
    try:
        return to_json(event, fallback=repr, inf_nan_mode="null").decode()
    except ValueError:  # half a surrogate pair, which UTF-8 does not have
        return json.dumps(event, **how)
