"""Trace files: what arrives when, and which prompts share which blocks.

Two formats are read, told apart row by row by their fields; both are JSON Lines, plain (`.jsonl`)
or gzip (`.jsonl.gz`), one request a line.

**Timestable format** (written by `python -m loadgen generate`):

| field             | type            | meaning                                                   |
| ----------------- | --------------- | --------------------------------------------------------- |
| arrival_s         | number >= 0     | seconds from the start of the trace                       |
| prompt_tokens     | integer >= 1    | length of the prompt; for `text` an estimate              |
| output_tokens     | integer >= 1    | length of the answer                                      |
| block_ids         | list of integer | one id per block, the last block may be partly filled     |
| block_size_tokens | integer >= 1    | tokens per full block; needed with block_ids              |
| token_ids         | list of integer | the prompt itself, instead of block_ids                   |
| text              | string          | the prompt itself, instead of block_ids; sent as chat     |
| session_id        | string          | optional: requests of one conversation                    |
| turn              | integer >= 0    | optional: place in the conversation                       |

Exactly one of `block_ids`, `token_ids` and `text` is present; other fields are ignored. Equal block
ids stand for equal tokens, and a partly filled block is a prefix of the full block of the same id,
so a prompt that grows keeps the id of the block it grows in.

**Mooncake format** (Qin et al., "Mooncake", FAST 2025; github.com/kvcache-ai/Mooncake):
`timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id per 512-token block;
an id stands for the block and all before it).
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import TraceError

MOONCAKE_BLOCK_SIZE_TOKENS = 512
LINE_BYTES_MAX = 32 << 20  # a prompt of a million token ids is about 8 MB of JSON
TRACE_SUFFIXES = (".jsonl", ".gz")
ROWS_MAX = 5_000_000  # rows are kept in memory, about 2 kB each with a typical block list
PROMPT_TOKENS_MAX = 10_000_000  # far above any model: a larger figure is a wrong unit
_READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. Raises ValueError with a reason when the fields contradict.

    Args:
        arrival_s: seconds from the start of the trace.
        prompt_tokens: prompt length.
        output_tokens: answer length, which the engine is told to produce exactly.
        block_ids: one id per block of block_size_tokens; empty when token_ids or text is given.
        block_size_tokens: the trace's block size, independent of any engine's.
        session_id: conversation, where the trace labels it.
        turn: place in the conversation from 0, where the trace labels it.
        token_ids: the prompt itself.
        text: the prompt itself, sent as one chat message.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_size_tokens: int = MOONCAKE_BLOCK_SIZE_TOKENS
    session_id: str | None = None
    turn: int | None = None
    token_ids: tuple[int, ...] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival must be a finite number >= 0, got {self.arrival_s}")
        if not 1 <= self.prompt_tokens <= PROMPT_TOKENS_MAX:
            raise ValueError(
                f"prompt length must be 1 to {PROMPT_TOKENS_MAX} tokens, got {self.prompt_tokens}"
            )
        if self.output_tokens < 1:
            raise ValueError(f"output length must be at least 1 token, got {self.output_tokens}")
        if self.block_size_tokens < 1:
            raise ValueError(f"block size must be at least 1 token, got {self.block_size_tokens}")
        given = bool(self.block_ids) + (self.token_ids is not None) + (self.text is not None)
        if given != 1:
            raise ValueError("exactly one of block ids, token ids and text must be given")
        blocks = -(-self.prompt_tokens // self.block_size_tokens)
        if self.block_ids and len(self.block_ids) != blocks:
            raise ValueError(
                f"{self.prompt_tokens} prompt tokens need {blocks} block ids of "
                f"{self.block_size_tokens} tokens, got {len(self.block_ids)}"
            )
        if self.token_ids is not None and len(self.token_ids) != self.prompt_tokens:
            raise ValueError(
                f"prompt length is {self.prompt_tokens}, but {len(self.token_ids)} token ids"
            )

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Ids of the completely filled blocks."""
        return self.block_ids[: self.prompt_tokens // self.block_size_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The rows of one file in order of arrival (file order among equals).

    Args:
        path: where it came from.
        format_name: "timestable", "mooncake" or, for a file with both, "mixed".
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
        path: `.jsonl` or `.jsonl.gz`.
        skip_bad_rows: count broken rows and go on, instead of raising at the first.

    Raises:
        TraceError: unreadable file, no row, or a broken row (file, line number and reason).
    """
    path = Path(path)
    rows: list[TraceRow] = []
    formats: set[str] = set()
    skipped = 0
    for line_number, line in _numbered_lines(path):
        try:
            format_name, row = parse_row(line)
        except ValueError as exc:
            if skip_bad_rows:
                skipped += 1
                continue
            raise TraceError(
                path,
                f"{exc} (leave broken rows out with --skip_bad_rows true)",
                line_number=line_number,
            ) from exc
        formats.add(format_name)
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
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"line is longer than {LINE_BYTES_MAX} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")  # noqa: TRY004
    if "arrival_s" in fields:
        return "timestable", _timestable_row(fields)
    if "timestamp" in fields and "hash_ids" in fields:
        return "mooncake", _mooncake_row(fields)
    names = ", ".join(sorted(map(str, fields))[:8]) or "none"
    raise ValueError(
        f"unknown trace format (fields: {names}); expected arrival_s, prompt_tokens, "
        "output_tokens, block_ids or Mooncake's timestamp, input_length, output_length, hash_ids"
    )


def write_trace(path: Path | str, rows: Iterable[TraceRow]) -> None:
    """Write rows in the Timestable format; gzip when the name ends in `.gz`.

    Equal rows give equal bytes: no time of writing is stored.
    """
    path = Path(path)
    text = b"".join(json.dumps(_row_fields(row)).encode() + b"\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def check_kind(path: Path) -> None:
    """Refuse a name that no reader of traces takes. Raises TraceError."""
    if path.suffix not in TRACE_SUFFIXES:
        raise TraceError(path, "unknown kind of file; expected .jsonl or .jsonl.gz")


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers from 1; a line over the limit comes cut at the limit."""
    if not path.exists():
        raise TraceError(path, "does not exist")
    check_kind(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    _skip_rest_of_line(file, line)
                if line.strip():
                    yield number, line
    except _READ_ERRORS as exc:
        raise TraceError(path, f"cannot be read: {exc}") from exc


def _skip_rest_of_line(file: io.BufferedIOBase, part: bytes) -> None:
    while part and not part.endswith(b"\n"):
        part = file.readline(LINE_BYTES_MAX)


def _timestable_row(fields: Mapping[str, object]) -> TraceRow:
    session_id = fields.get("session_id")
    if session_id is not None and not isinstance(session_id, str):
        raise ValueError("session_id must be a string")
    text = fields.get("text")
    if text is not None and not isinstance(text, str):
        raise ValueError("text must be a string")
    block_ids = _integers(fields, "block_ids") if "block_ids" in fields else ()
    return TraceRow(
        arrival_s=_number(fields, "arrival_s"),
        prompt_tokens=_integer(fields, "prompt_tokens"),
        output_tokens=_integer(fields, "output_tokens"),
        block_ids=block_ids,
        block_size_tokens=_integer(fields, "block_size_tokens")
        if block_ids
        else MOONCAKE_BLOCK_SIZE_TOKENS,
        session_id=session_id,
        turn=_integer(fields, "turn") if fields.get("turn") is not None else None,
        token_ids=_integers(fields, "token_ids") if "token_ids" in fields else None,
        text=text,
    )


def _mooncake_row(fields: Mapping[str, object]) -> TraceRow:
    return TraceRow(
        arrival_s=_number(fields, "timestamp") / 1000,
        prompt_tokens=_integer(fields, "input_length"),
        output_tokens=_integer(fields, "output_length"),
        block_ids=_integers(fields, "hash_ids"),
        block_size_tokens=MOONCAKE_BLOCK_SIZE_TOKENS,
    )


def _row_fields(row: TraceRow) -> dict[str, float | int | str | Sequence[int]]:
    """JSON fields of a row; absent values are left out."""
    fields: dict[str, float | int | str | Sequence[int]] = {
        "arrival_s": row.arrival_s,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
    }
    if row.session_id is not None:
        fields["session_id"] = row.session_id
    if row.turn is not None:
        fields["turn"] = row.turn
    if row.token_ids is not None:
        fields["token_ids"] = row.token_ids
    elif row.text is not None:
        fields["text"] = row.text
    else:
        fields["block_size_tokens"] = row.block_size_tokens
        fields["block_ids"] = row.block_ids
    return fields


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")  # noqa: TRY004
    try:
        return float(value)
    except OverflowError as exc:
        raise ValueError(f"{name} is too large") from exc


def _integer(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} must be an integer >= 0, got {value!r:.60}")
    return value


def _integers(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} must be a list of integers with at least one")
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError(f"{name} must hold integers from 0 to 2^63 - 1 only")
    return tuple(values)
