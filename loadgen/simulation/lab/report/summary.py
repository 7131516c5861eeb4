"""The lab's runs as JSON, `{"runs": [{"workload", "load", "policy", ...}, ...]}`, in seconds.

A figure nothing was measured of is null. A run per line, so that two summaries can be compared.
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

_RUNS: Final = pydantic.TypeAdapter(list[RunFigures])
_DIGITS = 6  # of a number; more is noise, and files of a thousand runs are read by people


def summary_json(runs: Sequence[RunFigures]) -> str:
    """All runs, in the order given."""
    lines = [json.dumps(_plain(asdict(run)), allow_nan=False) for run in runs]
    return '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"


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
