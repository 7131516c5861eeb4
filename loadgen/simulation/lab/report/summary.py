"""The lab's runs as JSON, `{"runs": [{"workload", "load", "policy", ...}, ...]}`, in seconds.

Where eviction policies were compared, `"eviction": [{"workload", "cache_blocks", "policy",
"hit_ratio", "queued_ttft_mean_s", ...}, ...]` says over all seeds what that gave. A figure nothing
was measured of is null. A run per line, so that two summaries can be compared.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from typing import Final

import pydantic

from loadgen.errors import RecordsError
from loadgen.simulation.lab.figures import RunFigures
from loadgen.simulation.lab.report.evictions import EvictionRow, eviction_rows

_RUNS: Final = pydantic.TypeAdapter(list[RunFigures])
_DIGITS = 6  # of a number; more is noise, and files of a thousand runs are read by people


def summary_json(runs: Sequence[RunFigures]) -> str:
    """All runs, in the order given."""
    tables: dict[str, Sequence[RunFigures | EvictionRow]] = {}
    if len({run.eviction for run in runs}) > 1:
        tables["eviction"] = eviction_rows(runs)
    tables["runs"] = runs
    return "{" + ",\n".join(f'"{name}": {_lines(of)}' for name, of in tables.items()) + "}\n"


def _lines(rows: Sequence[RunFigures | EvictionRow]) -> str:
    lines = [json.dumps(_plain(asdict(row)), allow_nan=False) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]"


def write_summary(path: Path, runs: Sequence[RunFigures]) -> None:
    """Write the file at once: a reader sees the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(summary_json(runs), encoding="utf-8")
    part.replace(path)


def read_summary(path: Path) -> list[RunFigures]:
    """Read a written file; keys of later versions are ignored.

    Raises:
        RecordsError: the file cannot be read, or is none of this kind.
    """
    try:
        found = json.loads(path.read_bytes())
        runs = [_with_nan(run) for run in found["runs"]]
        return _RUNS.validate_python(runs)
    except OSError as exc:
        raise RecordsError(f"{path}: cannot be read: {exc}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RecordsError(f"{path}: no summary of lab runs: {exc}") from exc


def _with_nan(run: dict[str, object]) -> dict[str, object]:
    return {key: nan if value is None else value for key, value in run.items()}


def _plain(value: object) -> object:
    """What JSON can say: no NaN, no infinity, no digits beyond the noise."""
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}") if isfinite(value) else None
        case dict():
            return {key: _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case _:
            return value
