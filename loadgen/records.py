"""Raw records of requests: what was sent when and what came back when, nothing aggregated.

Saved as JSON Lines (gzip when the name ends in `.gz`): a first line that names the run, then one
line per request. Reports are made from these files, so a question that comes up later needs no
second run.
"""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from loadgen.errors import RecordsError

FORMAT = "timestable-records"
VERSION = 1
_READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds since the start of the run.

    Args:
        request_id: sent as x-request-id.
        row_index: place in the replayed rows.
        scheduled_s: when it was due.
        sent_s: when it was sent (accepted, in the words of TTFT); None when it never was.
        sent_unix_s: the same moment on the wall clock, to be compared with the servers' logs.
        first_token_s: first non-empty token.
        token_times_s: each token event, first token first; fewer than output_tokens where the
            server packs several tokens into one event.
        finished_s: end of the answer, or the moment of the error.
        status: HTTP status; None when no answer began.
        error: None, or kind and reason, e.g. "http 503: no instance", "timeout: ...",
            "disconnected: ...", "connect: ...", "malformed: ...", "stream: ...", "interrupted".
        prompt_tokens: as told by the usage event, else as in the trace.
        output_tokens: as told by the usage event, else the token events received.
        cached_tokens: prompt tokens the engine found in its KV$; None when not told.
        instance: answer header x-timestable-instance.
        decision: answer header x-timestable-decision, parsed.
    """

    request_id: str
    row_index: int
    scheduled_s: float
    sent_s: float | None = None
    sent_unix_s: float | None = None
    first_token_s: float | None = None
    token_times_s: tuple[float, ...] = ()
    finished_s: float | None = None
    status: int | None = None
    error: str | None = None
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int | None = None
    instance: str | None = None
    decision: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A named list of records, as shown side by side in a report.

    Args:
        name: e.g. the policy.
        records: any order.
        notes: what was run, by label, e.g. {"trace": ..., "seed": ...}.
        extra_figures: further figures of the table by label, unit in the label,
            e.g. {"router added, P50 (ms)": 0.8}; values that are text are shown as they are.
    """

    name: str
    records: Sequence[RequestRecord]
    notes: Mapping[str, str] = field(default_factory=dict)
    extra_figures: Mapping[str, float | str] = field(default_factory=dict)


def write_run(path: Path | str, run: Run) -> None:
    """Save a run; directories are made as needed."""
    path = Path(path)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "name": run.name,
        "notes": dict(run.notes),
        "extra_figures": dict(run.extra_figures),
    }
    lines = [json.dumps(header), *(json.dumps(asdict(record)) for record in run.records)]
    text = ("\n".join(lines) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)


def read_run(path: Path | str) -> Run:
    """Read a saved run; fields of later versions are ignored.

    Raises:
        RecordsError: file and reason.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
        if path.suffix == ".gz":
            text = gzip.decompress(text)
    except _READ_ERRORS as exc:
        raise RecordsError(f"{path}: cannot be read: {exc}") from exc
    first, *lines = text.splitlines() or [b""]
    try:
        header = json.loads(first)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise RecordsError(f"{path}: not a file of request records")
        records = [_record(json.loads(line)) for line in lines]
        return Run(
            name=str(header["name"]),
            records=records,
            notes={str(k): str(v) for k, v in header.get("notes", {}).items()},
            extra_figures=dict(header.get("extra_figures", {})),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise RecordsError(f"{path}: broken record file: {exc}") from exc


def _record(values: Mapping[str, object]) -> RequestRecord:
    known = {f.name: values[f.name] for f in fields(RequestRecord) if f.name in values}
    known["token_times_s"] = tuple(known.get("token_times_s", ()))  # type: ignore[arg-type]
    return RequestRecord(**known)  # type: ignore[arg-type]  # the file is our own
