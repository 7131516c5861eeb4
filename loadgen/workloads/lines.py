"""Lines of a trace file: plain, gzip or Zstandard, never more than one line in memory."""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from loadgen.errors import TraceError
from loadgen.workloads import fields

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_UNREADABLE = (OSError, EOFError, zlib.error, zstd.ZstdError)

TRACE_SUFFIXES = (".jsonl", ".gz", ".zst")
WRITTEN_SUFFIXES = (".jsonl", ".gz")


def check_kind(path: Path, suffixes: tuple[str, ...] = TRACE_SUFFIXES) -> None:
    """Refuse a name with none of the endings. Raises TraceError."""
    if path.suffix not in suffixes:
        names = " or ".join(s if s == ".jsonl" else f".jsonl{s}" for s in suffixes)
        raise TraceError(path, f"unknown kind of file; expected {names}")


def numbered_lines(
    path: Path, on_read: Callable[[int], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers from 1; a line over the limit comes cut at the limit.

    A last line that breaks off, as a writer leaves that still writes or was killed, is left out.

    Args:
        path: the file.
        on_read: told after each line how many bytes of the file, as it is on disk, are read.

    Raises:
        TraceError: missing, of an unknown kind, unreadable or truncated.
    """
    if not path.exists():
        raise TraceError(path, "does not exist")
    check_kind(path)
    try:
        with path.open("rb") as file:
            stream: io.BufferedIOBase = file
            if path.suffix == ".zst":
                stream = zstd.ZstdFile(file)
            elif path.suffix == ".gz":
                stream = gzip.GzipFile(fileobj=file)
            with stream:
                for numbered in _lines(stream):
                    yield numbered
                    if on_read is not None:
                        on_read(file.tell())
    except _UNREADABLE as exc:
        raise TraceError(path, f"cannot be read: {exc}") from exc


def _lines(stream: io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(fields.LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > fields.LINE_BYTES_MAX:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(fields.LINE_BYTES_MAX)
        elif _breaks_off(line):
            return
        if line.strip():
            yield number, line


def _breaks_off(line: bytes) -> bool:
    """It has no end and is no JSON: writers end lines, people who write traces by hand may not."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False
