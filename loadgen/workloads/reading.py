"""Reads any trace, whatever its format, as a stream of rows.

Formats are told apart by the fields of a file's first row. Rows come in the order of the file (for
formats with a conversation a line: one conversation after another); `ordering.by_arrival` sorts
them without holding them all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from loadgen.errors import TraceError
from loadgen.trace_row import TraceRow
from loadgen.workloads import ragpulse, servegen
from loadgen.workloads.azure import AzureReader
from loadgen.workloads.bailian import BailianReader
from loadgen.workloads.fields import Fields, parse_object
from loadgen.workloads.lines import numbered_lines
from loadgen.workloads.lmcache import LmcacheReader
from loadgen.workloads.mooncake import mooncake_row
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.tau_bench import TauBenchReader
from loadgen.workloads.timestable import timestable_row
from loadgen.workloads.weka import WekaReader

T = TypeVar("T")
_SECOND_FILES = {"servegen_lengths": "rates", "ragpulse_components": "requests"}
_ORDERED = frozenset(("servegen_rates",))  # by construction; other files may have late lines


class Reader(Protocol):
    """What a format is to the rest: lines in, requests out."""

    def rows(self, fields: Fields) -> Iterable[TraceRow]:
        """The requests that this line completes. Raises ValueError with a reason."""

    def finish(self) -> Iterable[TraceRow]:
        """The requests still held at the end of the file. Raises ValueError with a reason."""


@dataclass(slots=True)
class _RowByRow:
    """A format with one request a line that leaves nothing open."""

    row: Callable[[Fields], TraceRow]

    def rows(self, fields: Fields) -> list[TraceRow]:
        return [self.row(fields)]

    def finish(self) -> list[TraceRow]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Which part of a trace is wanted.

    Args:
        from_s: requests that arrive before this are left out; arrivals then count from here.
        duration_s: requests that arrive this long after from_s or later are left out.
        rows_max: no more rows than this, in the order of the file.
        lines_max: of each file of requests only so many lines: conversations, in weka's and
            tau-bench's formats.
    """

    from_s: float = 0.0
    duration_s: float | None = None
    rows_max: int | None = None
    lines_max: int | None = None


EVERYTHING = Span()


def format_name(fields: Fields) -> str:
    """Name of the format that a row is in. Raises ValueError when there is none like it."""
    by_fields = {
        "timestable": "arrival_s" in fields,
        "bailian": "chat_id" in fields and "parent_chat_id" in fields,
        "ragpulse": "session_id" in fields and isinstance(fields.get("hash_ids"), dict),
        "mooncake": "timestamp" in fields and "hash_ids" in fields,
        "azure": "ContextTokens" in fields,
        "weka": "hash_id_scope" in fields and "requests" in fields,
        "tau_bench": "traj" in fields,
        "lmcache": "session_id" in fields and "input" in fields and "output" in fields,
        "servegen_rates": servegen.is_rates(fields),
        "servegen_lengths": servegen.is_lengths(fields),
        "ragpulse_components": ragpulse.is_component(fields),
    }
    for name, matches in by_fields.items():
        if matches:
            return name
    names = ", ".join(sorted(map(str, fields))[:8]) or "none"
    raise ValueError(
        f"unknown trace format (fields: {names}); expected arrival_s, prompt_tokens, "
        "output_tokens, block_ids, Mooncake's timestamp, input_length, output_length, hash_ids, "
        "or another format of docs/traces.md"
    )


def single_traces(paths: Sequence[Path]) -> list[list[Path]]:
    """Each trace of several files by itself, with the second files that its format has.

    Raises:
        TraceError: as `read_rows`.
    """
    formats = {path: _first_format(path) for path in paths}
    seconds = {path: _SECOND_FILES[name] for path, name in formats.items() if name in _SECOND_FILES}
    traces = [path for path in paths if path not in seconds]
    if not traces and seconds:
        path, missing = next(iter(seconds.items()))
        raise TraceError(path, f"is only half of a trace; add the file of {missing}")
    return [[trace, *seconds] for trace in traces]


def read_rows(
    paths: Sequence[Path],
    options: ReadOptions,
    span: Span = EVERYTHING,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[TraceRow]:
    """The requests of a trace, in the order of its files.

    Args:
        paths: one trace, its second file beside it where the format has two (ServeGen's rates and
            lengths, ragpulse's trace and components; in any order); or several traces, which are
            mixed: their blocks and sessions are kept apart.
        options: what the trace leaves open.
        span: the part wanted.
        on_read: told after each line of requests how many bytes of its file are read.

    Raises:
        TraceError: unreadable file, unknown format, a broken row, a missing second file or choice.
    """
    formats = {path: _first_format(path) for path in paths}
    second = {name: path for path, name in formats.items() if name in _SECOND_FILES}
    traces = [path for path, name in formats.items() if name not in _SECOND_FILES]
    if not traces:
        name, path = next(iter(second.items()), ("", Path()))
        raise TraceError(path, f"is only half of a trace; add the file of {_SECOND_FILES[name]}")
    rows_left = span.rows_max
    for place, path in enumerate(traces):
        reader = _reader(path, formats[path], second, options, span)
        rows = _within(
            _stream(path, reader, span.lines_max, on_read),
            span,
            ordered=formats[path] in _ORDERED,
        )
        for row in islice(rows, rows_left):
            yield row if place == 0 else _kept_apart(row, place)
            if rows_left is not None:
                rows_left -= 1


def _reader(
    path: Path, name: str, second: dict[str, Path], options: ReadOptions, span: Span
) -> Reader:
    """The reader of a format; second files are read whole, they hold no requests."""
    if name == "ragpulse":
        components = _second(path, "ragpulse_components", second, "components")
        return ragpulse.RagpulseReader(options, dict(_each(components, ragpulse.component)))
    if name == "servegen_rates":
        lengths = servegen.ServegenLengths()
        for _ in _each(_second(path, "servegen_lengths", second, "lengths"), lengths.add):
            pass  # `add` keeps what it is given
        return servegen.ServegenReader(options, lengths, from_s=span.from_s)
    readers: dict[str, Callable[[], Reader]] = {
        "timestable": lambda: _RowByRow(timestable_row),
        "mooncake": lambda: _RowByRow(mooncake_row),
        "bailian": lambda: _RowByRow(BailianReader().row),
        "azure": lambda: AzureReader(options),
        "weka": lambda: WekaReader(options),
        "tau_bench": lambda: TauBenchReader(options),
        "lmcache": lambda: LmcacheReader(options),
    }
    return readers[name]()


def _second(path: Path, name: str, second: dict[str, Path], content: str) -> Path:
    if name not in second:
        raise TraceError(path, f"is only half of a trace; add the file of {content}")
    return second[name]


def _first_format(path: Path) -> str:
    for name in _each(path, format_name):
        return name
    raise TraceError(path, "the file has no rows; expected one JSON object per line")


def _each(path: Path, read: Callable[[Fields], T]) -> Iterator[T]:
    """What `read` makes of each line; its ValueErrors become TraceErrors with the line."""
    for line_number, line in numbered_lines(path):
        try:
            value = read(parse_object(line))
        except ValueError as exc:
            raise TraceError(path, str(exc), line_number=line_number) from exc
        yield value


def _stream(
    path: Path, reader: Reader, lines_max: int | None, on_read: Callable[[int], None] | None
) -> Iterator[TraceRow]:
    """The rows of a file; the line of an error is the one that completed the request."""
    last: int | None = None
    try:
        for line_number, line in islice(numbered_lines(path, on_read), lines_max):
            last = line_number
            yield from reader.rows(parse_object(line))
        yield from reader.finish()
    except ValueError as exc:
        raise TraceError(path, str(exc), line_number=last) from exc


def _within(rows: Iterable[TraceRow], span: Span, *, ordered: bool) -> Iterator[TraceRow]:
    end_s = float("inf") if span.duration_s is None else span.from_s + span.duration_s
    for row in rows:
        if row.arrival_s >= end_s and ordered:
            return
        if span.from_s <= row.arrival_s < end_s:
            yield replace(row, arrival_s=row.arrival_s - span.from_s) if span.from_s else row


def _kept_apart(row: TraceRow, place: int) -> TraceRow:
    """The row with ids that no other trace of the mix has."""

    def name(value: str | None) -> str | None:
        return None if value is None else f"{place}:{value}"

    ids = (xxh3_64_intdigest(b"%d:%d" % (place, block)) >> 1 for block in row.block_ids)
    return replace(
        row,
        block_ids=tuple(ids),
        session_id=name(row.session_id),
        request_id=name(row.request_id),
        parent_id=name(row.parent_id),
    )
