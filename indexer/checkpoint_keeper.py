"""Reads a rank's checkpoint at its start, writes it now and then; keeps the disk off the loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from indexer import checkpoint
from indexer.checkpoint import Checkpoint, Subject
from indexer.engine.history import Position
from indexer.errors import MalformedCheckpoint
from indexer.table.holdings import Holdings
from indexer.telemetry import Telemetry

WRITE_EVERY_MIN_S: Final = 10.0
WRITE_EVERY_RATIO: Final = 100.0
"""Between two checkpoints so many times as long as one takes: a hundredth of the time at most."""

LAST_WRITE_DEADLINE_S: Final = 5.0
LOOK_S: Final = 1.0


class CheckpointKeeper:
    """The checkpoint file of one rank."""

    def __init__(
        self, directory: Path, subject: Subject, telemetry: Telemetry, *, rank: str
    ) -> None:
        self._path = subject.path(directory)
        self._subject = subject
        self._telemetry = telemetry
        self._rank = rank
        self._log = structlog.get_logger().bind(rank=rank, path=str(self._path))
        self._revision = -1  # of the holdings last written
        self._written_s: float | None = None
        self._took_s = 0.0
        self._file_lock = threading.Lock()

    async def read(self, empty: Holdings) -> tuple[Position, Holdings] | None:
        """What was last written, and behind which batch; None without a usable checkpoint."""
        try:
            read = await asyncio.to_thread(self._read, empty)
        except (MalformedCheckpoint, MemoryError) as error:
            self._loaded("unusable")
            self._log.warning("checkpoint_unusable", reason=str(error) or repr(error))
            return None
        if read is None:
            self._loaded("absent")
        return read

    def _read(self, empty: Holdings) -> tuple[Position, Holdings] | None:
        found = checkpoint.read(self._path, self._subject)
        return None if found is None else (found.position, empty.load(found.saved))

    def judged(self, refused: str | None, blocks: int) -> None:
        """The ring was asked whether the checkpoint is about this engine process."""
        self._loaded("used" if refused is None else "refused")
        if refused is None:
            self._log.info("checkpoint_used", blocks=blocks)
        else:
            self._log.warning("checkpoint_refused", reason=refused, blocks=blocks)

    def _loaded(self, outcome: str) -> None:
        self._telemetry.checkpoint_loads.labels(self._rank, outcome).inc()

    async def run(self, current: Callable[[], tuple[Position, Holdings] | None]) -> None:
        """Write whenever something has changed, not too often, and once more when cancelled.

        Args:
            current: the holdings and their place in the history; None while there is none.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() + WRITE_EVERY_MIN_S
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self.export()
                if loop.time() < due_s:
                    continue
                await self._write(current())
                due_s = loop.time() + max(WRITE_EVERY_MIN_S, WRITE_EVERY_RATIO * self._took_s)
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(LAST_WRITE_DEADLINE_S):
                    await self._write(current())
            except TimeoutError:
                self._failed("it took too long")
            raise

    async def _write(self, now: tuple[Position, Holdings] | None) -> None:
        if now is None or now[1].revision == self._revision:
            return
        position, holdings = now
        started_s = time.perf_counter()
        saved = holdings.save()
        assert saved is not None, "a place in the history without a batch"
        revision = holdings.revision
        taken = Checkpoint(position=position, saved=saved)
        try:
            size_bytes = await asyncio.to_thread(self._write_file, taken)
        except (OSError, MemoryError) as error:
            self._failed(str(error) or repr(error))
            return
        self._took_s = time.perf_counter() - started_s
        self._revision, self._written_s = revision, time.monotonic()
        self._telemetry.checkpoint_bytes.labels(self._rank).set(size_bytes)
        self.export()

    def _write_file(self, taken: Checkpoint) -> int:
        with self._file_lock:  # a thread goes on when the task that waits for it is cancelled
            return checkpoint.write(self._path, self._subject, taken)

    def _failed(self, reason: str) -> None:
        self._telemetry.checkpoint_failures.labels(self._rank).inc()
        self._log.warning("checkpoint_not_written", reason=reason)

    def export(self) -> None:
        """Bring the age up to date."""
        if self._written_s is not None:
            age_s = time.monotonic() - self._written_s
            self._telemetry.checkpoint_age_s.labels(self._rank).set(age_s)
