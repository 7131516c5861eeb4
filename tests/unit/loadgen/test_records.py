"""Saved records read back equal."""

from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.errors import RecordsError
from loadgen.records import RequestRecord, Run, read_run, write_run


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_run_reads_back_equal(
    tmp_path: Path, make_record: Callable[..., RequestRecord], name: str
) -> None:
    """Every field, also the absent ones and the decision."""
    run = Run(
        name="lmetric",
        records=[
            make_record(decision={"policy": "lmetric", "candidates": [{"score": 1.5}]}),
            RequestRecord(request_id="x", row_index=1, scheduled_s=2.0, prompt_tokens=5),
        ],
        notes={"seed": "1"},
        extra_figures={"a (ms)": 1.5, "b": "text"},
    )
    write_run(tmp_path / name, run)
    assert run == read_run(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "broken record file"),
        (b'{"arrival_s": 0}\n', "not a file of request records"),
        (b'{"format": "timestable-records", "name": "x"}\n{"a": 1}\n', "broken record file"),
        (b'{"format": "timestable-records", "name": "x"}\n[]\n', "broken record file"),
    ],
)
def test_foreign_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    """A clear error, no traceback."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordsError, match=reason):
        read_run(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """No bare OSError gets out."""
    with pytest.raises(RecordsError, match=r"none\.jsonl: cannot be read"):
        read_run(tmp_path / "none.jsonl")
