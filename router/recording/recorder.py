"""Writes what has been answered to a trace file, beside the requests: they never wait for it."""

import asyncio
import queue
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol

import structlog

from router import telemetry
from router.attempt import Question
from router.recording.anonymous import KEY_BYTES
from router.recording.trace_lines import Answered, TraceLines
from router.request_record import RequestRecord
from router.requests.api_call import Cost

log = structlog.get_logger()

SUFFIX: Final = ".jsonl"

WAITING_MAX: Final = 1024
"""Requests that the writer has not come to, about 70 KB each at most."""

BATCH_MAX: Final = 64
"""Requests written at once: the busier the router, the less each of them costs."""

CLOSE_S: Final = 5.0
"""For the writer to end with what waits; the rest is not written."""

FILES_MAX: Final = 10_000
"""Of one name: every start of a process begins another."""


class RecordingUnavailable(Exception):  # noqa: N818 - names a condition
    """The trace file cannot be made; the message says what to change."""


class TraceFile(Protocol):
    """What is written to: an unbuffered file."""

    def write(self, data: bytes, /) -> int | None:
        """How much of it was taken."""

    def truncate(self, size: int, /) -> int:
        """Leave so many bytes."""

    def close(self) -> None:
        """Let go of it."""


class Recorder:
    """Takes answered requests and writes them in a thread of its own.

    Args:
        file: new and empty; closed at the end.
        bytes_max: of the file; what does not fit is counted.
        clock: monotonic seconds, as of records.
        waiting_max: requests that may wait for the writer.
    """

    def __init__(
        self,
        file: TraceFile,
        *,
        bytes_max: int,
        clock: Callable[[], float] = time.monotonic,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._file = file
        self._bytes_left = bytes_max
        self._bytes = 0
        self._waiting_max = waiting_max
        self._began_s = clock()
        self._lines = TraceLines(secrets.token_bytes(KEY_BYTES))
        self._ended: str | None = None
        self._waiting: queue.SimpleQueue[Answered | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)

    def take(self, question: Question, record: RequestRecord) -> None:
        """A request has been answered. Returns at once, whatever happens to its line."""
        call = question.call
        if call.cost is Cost.NONE:
            return  # it has no prompt
        if record.status is None or not 200 <= record.status < 300:  # noqa: PLR2004  # success
            self._not_written("refused")
        elif call.prompts_count > 1:
            self._not_written("several_prompts")
        elif self._ended is not None:
            self._not_written(self._ended)
        elif self._waiting.qsize() >= self._waiting_max:
            self._not_written("behind")
        else:
            self._waiting.put(
                Answered(
                    accepted_s=max(0.0, record.accepted_s - self._began_s),
                    hashes=question.hashes,
                    block_size_tokens=question.served.fleet.block_size_tokens,
                    prompt_tokens=question.view.prompt_tokens,
                    output_tokens=record.output_tokens_told(),
                    kind=call.endpoint.removeprefix("/v1/"),
                    turn=call.turn,
                    session_id=call.session_id,
                )
            )

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("recording_cut_off", waiting=self._waiting.qsize())

    def _write_all(self) -> None:
        with closing(self._file):
            going_on = True
            while going_on:
                batch, going_on = self._next_batch()
                written = 0
                try:
                    if self._ended is None:
                        written = self._write(batch)
                except Exception as error:  # noqa: BLE001 - a recording never ends the router
                    self._end("failed", error=repr(error))
                    with suppress(OSError):
                        self._file.truncate(self._bytes)  # readers refuse a part of a line
                telemetry.RECORDED.labels("written").inc(written)
                if self._ended is not None:
                    self._not_written(self._ended, len(batch) - written)

    def _next_batch(self) -> tuple[list[Answered], bool]:
        """What waits, up to BATCH_MAX, at least one; and whether there may be more."""
        batch: list[Answered] = []
        while not batch or (len(batch) < BATCH_MAX and not self._waiting.empty()):
            answered = self._waiting.get()
            if answered is None:
                return batch, False
            batch.append(answered)
        return batch, True

    def _write(self, batch: list[Answered]) -> int:
        """How many of them are written: all, or those for which there is room."""
        lines = self._lines.lines(batch)
        ends = list(accumulate(map(len, lines)))
        fitting = bisect_right(ends, self._bytes_left)
        data = b"".join(lines[:fitting])
        if self._file.write(data) != len(data):
            raise OSError("the disk took only a part")
        self._bytes += len(data)
        self._bytes_left -= len(data)
        if fitting < len(lines):
            self._end("full")
        return fitting

    def _end(self, why: str, **fields: str) -> None:
        """Nothing more is written: a trace with holes would tell of other reuse."""
        self._ended = why
        log.warning("recording_ended", reason=why, **fields)

    def _not_written(self, why: str, count: int = 1) -> None:
        telemetry.RECORDED.labels(why).inc(count)


@asynccontextmanager
async def recording(name: str | None, bytes_max: int) -> AsyncIterator[Recorder | None]:
    """A recorder that writes until the context ends; None where no file is named.

    Args:
        name: of the file. Where there is one already, another is made: trace.jsonl, trace.2.jsonl.
        bytes_max: of it.

    Raises:
        RecordingUnavailable: the file cannot be made.
    """
    if name is None:
        yield None
        return
    path, file = _new_file(Path(name))
    recorder = Recorder(file, bytes_max=bytes_max)
    recorder.start()
    log.info("recording_begun", path=str(path), bytes_max=bytes_max)
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)


def _new_file(path: Path) -> tuple[Path, TraceFile]:
    for number in range(1, FILES_MAX + 1):
        own = path if number == 1 else path.with_suffix(f".{number}{path.suffix}")
        try:
            return own, own.open("xb", buffering=0)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:  # a name may have a zero character in it
            raise RecordingUnavailable(f"record_trace: {own} cannot be made: {error}") from None
    raise RecordingUnavailable(f"record_trace: there are {FILES_MAX} files like {path}; move them")
