"""Sorts a stream of rows by arrival without holding it: sorted runs on disk, then merged.

Traces with a conversation a line come one conversation after another, while their requests
interleave; the largest has 34,770 requests of 2,100 blocks on average, 600 MB as bare ids.
"""

import heapq
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from loadgen.trace_row import TraceRow
from loadgen.workloads.fields import parse_object
from loadgen.workloads.timestable import timestable_fields, timestable_row

HELD_IDS_MAX = 4_000_000
"""Block ids, token ids and characters held in memory: about 150 MB of Python objects."""

_ROW_COST = 20  # a row without its prompt, counted in ids


def by_arrival(rows: Iterable[TraceRow], *, held_ids_max: int = HELD_IDS_MAX) -> Iterator[TraceRow]:
    """The rows in order of arrival, equal arrivals in unchanged order.

    Args:
        rows: in any order.
        held_ids_max: beyond this, rows wait in temporary files, removed at the end. Those go where
            `TMPDIR` says and take about 10 bytes an id.
    """
    with tempfile.TemporaryDirectory(prefix="timestable-trace-") as directory:
        runs: list[Path] = []
        held: list[TraceRow] = []
        held_ids = 0
        for row in rows:
            held.append(row)
            held_ids += _ROW_COST + len(row.block_ids) + len(row.token_ids or row.text or ())
            if held_ids >= held_ids_max:
                runs.append(_write_run(Path(directory) / f"{len(runs)}.jsonl", held))
                held, held_ids = [], 0
        held.sort(key=_arrival_s)
        yield from heapq.merge(*map(_read_run, runs), held, key=_arrival_s)


def _arrival_s(row: TraceRow) -> float:
    return row.arrival_s


def _write_run(path: Path, rows: list[TraceRow]) -> Path:
    rows.sort(key=_arrival_s)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(timestable_fields(row)) + "\n")
    return path


def _read_run(path: Path) -> Iterator[TraceRow]:
    with path.open("rb") as file:
        for line in file:
            yield timestable_row(parse_object(line))
