"""The trace readers: two formats, and what a broken file is told."""

import gzip
import json
from pathlib import Path

import pytest

from loadgen.errors import TraceError
from loadgen.trace import TraceRow, parse_row, read_trace, write_trace
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import read_rows

MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}
OURS = {
    "arrival_s": 1.5,
    "prompt_tokens": 20,
    "output_tokens": 5,
    "block_ids": [1, 2],
    "block_size_tokens": 16,
}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_row_becomes_seconds_and_blocks_of_512_tokens() -> None:
    """Milliseconds become seconds; hash ids are block ids of 512 tokens."""
    expected = TraceRow(
        arrival_s=3.0,
        prompt_tokens=700,
        output_tokens=5,
        block_ids=(0, 9),
        block_size_tokens=512,
    )
    assert ("mooncake", expected) == parse_row(json.dumps(MOONCAKE).encode())


def test_own_format_reads_sessions_and_ignores_unknown_fields() -> None:
    """Optional labels are read, fields of later versions do no harm."""
    line = json.dumps({**OURS, "session_id": "s", "turn": 3, "colour": "red"}).encode()
    name, row = parse_row(line)
    assert (name, row.session_id, row.turn) == ("timestable", "s", 3)


def test_rows_come_in_order_of_arrival_and_keep_file_order_among_equals(tmp_path: Path) -> None:
    """A late line of an early arrival is sorted in; equal arrivals stay as in the file."""
    rows = [{**OURS, "arrival_s": at, "output_tokens": n} for n, at in enumerate((5, 1, 1), 1)]
    trace = read_trace(_write(tmp_path / "t.jsonl", *rows))
    assert [row.output_tokens for row in trace.rows] == [2, 3, 1]


def test_gzip_is_read_like_plain_text(tmp_path: Path) -> None:
    """The suffix decides."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode()))
    assert read_trace(path).format_name == "mooncake"


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    """The line number of an error is the one an editor shows."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(OURS) + "\n\n{broken\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: not valid JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "expected a JSON object, got list"),
        ({"foo": 1}, r"unknown trace format \(fields: foo\)"),
        ({**MOONCAKE, "timestamp": "x"}, "timestamp must be a number"),
        ({**MOONCAKE, "timestamp": -1}, "arrival must be 0 to"),
        ({**MOONCAKE, "input_length": 0}, "prompt length must be 1 to"),
        ({**MOONCAKE, "input_length": 10**12}, "prompt length must be 1 to"),
        ({**MOONCAKE, "input_length": True}, "input_length must be an integer"),
        ({**MOONCAKE, "output_length": 0}, "output length must be 1 to"),
        ({**MOONCAKE, "output_length": (1 << 63) - 1}, "output length must be 1 to"),
        ({**MOONCAKE, "hash_ids": [1]}, "700 prompt tokens need 2 block ids of 512 tokens, got 1"),
        ({**MOONCAKE, "hash_ids": {"a": 1}}, "hash_ids must be a list of integers"),
        ({**MOONCAKE, "hash_ids": [1, -2]}, "hash_ids must hold integers from 0"),
        ({**OURS, "block_size_tokens": 0}, "block size must be 1 to"),
        ({**OURS, "block_size_tokens": (1 << 63) - 1}, "block size must be 1 to"),
        ({**OURS, "text": "also"}, "exactly one of block ids, token ids and text"),
        ({**OURS, "session_id": 5}, "session_id must be a string"),
        ({**OURS, "turn": -1}, "turn must be an integer >= 0"),
        ({**OURS, "turn": (1 << 63) - 1}, "turn must be 0 to"),
        ({**OURS, "arrival_s": float("nan")}, "arrival must be 0 to"),
        ({**OURS, "arrival_s": 1.8e12}, "arrival must be 0 to"),  # milliseconds since 1970
    ],
)
def test_broken_row_is_named_with_its_reason(tmp_path: Path, row: object, reason: str) -> None:
    """File, line and reason, and what to do about it."""
    path = _write(tmp_path / "t.jsonl", OURS, row)
    with pytest.raises(TraceError, match=rf"line 2: {reason}.*--skip_bad_rows true"):
        read_trace(path)


def test_token_ids_must_match_the_prompt_length() -> None:
    """Two statements of one length may not differ."""
    row = {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "token_ids": [7, 8]}
    with pytest.raises(ValueError, match="prompt length is 3, but 2 token ids"):
        parse_row(json.dumps(row).encode())


def test_skipping_counts_broken_rows(tmp_path: Path) -> None:
    """With skip_bad_rows the good rows remain and the bad ones are counted."""
    path = _write(tmp_path / "t.jsonl", {"x": 1}, OURS, 7)
    trace = read_trace(path, skip_bad_rows=True)
    assert (len(trace.rows), trace.skipped_rows_count) == (1, 2)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl", b"", "the file has no rows"),
        ("t.jsonl", b"\n\n", "the file has no rows"),
        ("t.csv", b"a,b", r"unknown kind of file; expected \.jsonl"),
        ("t.jsonl.gz", b"not gzip", "cannot be read"),
        ("t.jsonl.gz", gzip.compress(b"{}\n" * 1000)[:-10], "cannot be read"),
    ],
)
def test_unusable_file_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    """Empty, foreign and truncated files each have their own reason."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path, skip_bad_rows=True)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """Whatever its ending, it is said to be missing."""
    with pytest.raises(TraceError, match=r"none\.csv: does not exist"):
        read_trace(tmp_path / "none.csv")


def test_only_broken_rows_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    """Nothing to replay is no trace."""
    path = _write(tmp_path / "t.jsonl", 1, 2)
    with pytest.raises(TraceError, match="all 2 rows are broken"):
        read_trace(path, skip_bad_rows=True)


def test_line_above_the_limit_is_one_broken_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless line is cut off and the next line is read as usual."""
    monkeypatch.setattr("loadgen.workloads.fields.LINE_BYTES_MAX", 200)
    path = tmp_path / "t.jsonl"
    path.write_text('"' + "x" * 1000 + '"\n' + json.dumps(OURS) + "\n")
    trace = read_trace(path, skip_bad_rows=True)
    assert (len(trace.rows), trace.skipped_rows_count) == (1, 1)


def test_a_last_line_that_breaks_off_is_left_out(tmp_path: Path) -> None:
    """What a writer leaves that was killed; one without its newline is whole, a broken one is not.

    Wherever it breaks off: even where nothing but the newline is missing.
    """
    line = json.dumps(OURS)
    path = tmp_path / "t.jsonl"
    for length in range(1, len(line) + 1):
        path.write_text(f"{line}\n{line[:length]}")
        assert len(read_trace(path).rows) == 1 + (length == len(line))
        assert len(list(read_rows([path], ReadOptions()))) == 1 + (length == len(line))
    path.write_text(f"{line}\n{line[:-1]}\n")
    with pytest.raises(TraceError, match="line 2: not valid JSON"):
        read_trace(path)


def test_writing_equal_rows_gives_equal_bytes(tmp_path: Path) -> None:
    """No time of writing and no name gets into the file."""
    rows = [parse_row(json.dumps(OURS).encode())[1]]
    write_trace(tmp_path / "a.jsonl.gz", rows)
    write_trace(tmp_path / "b.jsonl.gz", rows)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
