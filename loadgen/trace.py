"""Trace files: what arrives when, and which prompts share which blocks.

Traces are JSON Lines, plain (`.jsonl`), gzip (`.jsonl.gz`) or Zstandard (`.jsonl.zst`). Here those
with one request a line that leave nothing open are read whole: the Timestable format, Mooncake's
and Bailian's, told apart row by row by their fields. `loadgen.workloads.reading` streams these and
every other format, and `python -m loadgen convert` writes any of them in the Timestable format.

All formats, field by field: docs/traces.md.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loadgen.errors import TraceError
from loadgen.trace_row import MOONCAKE_BLOCK_SIZE_TOKENS, PROMPT_TOKENS_MAX, TraceRow
from loadgen.workloads.bailian import BailianReader
from loadgen.workloads.fields import Fields, parse_object
from loadgen.workloads.lines import TRACE_SUFFIXES, WRITTEN_SUFFIXES, check_kind, numbered_lines
from loadgen.workloads.mooncake import mooncake_row
from loadgen.workloads.reading import format_name
from loadgen.workloads.timestable import timestable_fields, timestable_row

__all__ = [
    "MOONCAKE_BLOCK_SIZE_TOKENS",
    "PROMPT_TOKENS_MAX",
    "TRACE_SUFFIXES",
    "WRITTEN_SUFFIXES",
    "Trace",
    "TraceRow",
    "check_kind",
    "parse_row",
    "read_trace",
    "write_trace",
]

ROWS_MAX = 5_000_000  # rows are kept in memory, about 2 kB each with a typical block list


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The rows of one file in order of arrival (file order among equals).

    Args:
        path: where it came from.
        format_name: "timestable", "mooncake", "bailian" or, for a file with several, "mixed".
        rows: never empty.
        skipped_rows_count: broken rows left out on request.
    """

    path: Path
    format_name: str
    rows: tuple[TraceRow, ...]
    skipped_rows_count: int


def read_trace(path: Path | str, *, skip_bad_rows: bool = False) -> Trace:
    """Read a trace file whole.

    Args:
        path: `.jsonl`, `.jsonl.gz` or `.jsonl.zst`.
        skip_bad_rows: count broken rows and go on, instead of raising at the first.

    Raises:
        TraceError: unreadable file, no row, or a broken row (file, line number and reason).
    """
    path = Path(path)
    rows: list[TraceRow] = []
    formats: set[str] = set()
    skipped = 0
    row_of = _row_makers()
    for line_number, line in numbered_lines(path):
        try:
            name, row = _parse(line, row_of)
        except ValueError as exc:
            if skip_bad_rows:
                skipped += 1
                continue
            raise TraceError(
                path,
                f"{exc} (leave broken rows out with --skip_bad_rows true)",
                line_number=line_number,
            ) from exc
        formats.add(name)
        rows.append(row)
        if len(rows) > ROWS_MAX:
            raise TraceError(path, f"more than {ROWS_MAX} rows; split the file")
    if not rows:
        found = f"all {skipped} rows are broken" if skipped else "the file has no rows"
        raise TraceError(path, f"{found}; expected one JSON object per line")
    rows.sort(key=lambda row: row.arrival_s)
    return Trace(
        path=path,
        format_name=formats.pop() if len(formats) == 1 else "mixed",
        rows=tuple(rows),
        skipped_rows_count=skipped,
    )


def parse_row(line: bytes) -> tuple[str, TraceRow]:
    """Name of the format and the row of one line. Raises ValueError with a reason."""
    return _parse(line, _row_makers())


def write_trace(path: Path | str, rows: Iterable[TraceRow]) -> int:
    """Write rows in the Timestable format, as they come; gzip when the name ends in `.gz`.

    Equal rows give equal bytes: neither a time of writing nor a name is stored. The file appears
    under its name when it is whole. Returns the number of rows.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    count = _write_lines(packed, rows)
            else:
                count = _write_lines(file, rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _write_lines(file: BinaryIO | gzip.GzipFile, rows: Iterable[TraceRow]) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(timestable_fields(row)).encode() + b"\n")
        count += 1
    return count


def _row_makers() -> dict[str, Callable[[Fields], TraceRow]]:
    """By format; Bailian's remembers the rows before."""
    return {
        "timestable": timestable_row,
        "mooncake": mooncake_row,
        "bailian": BailianReader().row,
    }


def _parse(line: bytes, row_of: dict[str, Callable[[Fields], TraceRow]]) -> tuple[str, TraceRow]:
    fields = parse_object(line)
    name = format_name(fields)
    if name not in row_of:
        raise ValueError(
            f"a row of a {name} trace leaves choices open; write it in the Timestable format "
            "first: python -m loadgen convert TRACE --output t.jsonl.gz"
        )
    return name, row_of[name](fields)
