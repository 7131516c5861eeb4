"""The checkpoint file: whole, about its subject, or none."""

import os
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import xxhash

from indexer import checkpoint
from indexer.checkpoint import CHECKPOINT_BYTES_MAX, DIGEST_BYTES, FORMAT, Checkpoint, Subject
from indexer.engine.history import Position
from indexer.errors import CheckpointUnwritable, MalformedCheckpoint
from indexer.table.holdings import Saved

SUBJECT = Subject(
    url="http://engine-7:8000",
    rank=1,
    model_scope="m",
    model_root="/models/m",
    block_size_tokens=16,
    engine_block_size_tokens=32,
)
CHECKPOINT = Checkpoint(
    position=Position(7, (1 << 64) - 1),
    saved=Saved(sequence=7, table={"names": [-1, b"x", 1 << 63]}, completeness=[True, 5, 9]),
)


def written(directory: Path, content: object, *, head: bytes = FORMAT) -> Path:
    """A file with a right digest, whatever its content."""
    path = SUBJECT.path(directory)
    packed = content if isinstance(content, bytes) else msgpack.packb(content)
    path.write_bytes(head + xxhash.xxh3_128_digest(packed) + packed)
    return path


def whole(directory: Path) -> tuple[Path, bytes]:
    """A good checkpoint and its bytes."""
    path = SUBJECT.path(directory)
    size_bytes = checkpoint.write(path, SUBJECT, CHECKPOINT)
    raw = path.read_bytes()
    assert len(raw) == size_bytes
    return path, raw


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Everything comes back as it was; nothing else is left in the directory."""
    path, _ = whole(tmp_path)
    assert checkpoint.read(path, SUBJECT) == CHECKPOINT
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_not_an_error(tmp_path: Path) -> None:
    """A first start has no checkpoint."""
    assert checkpoint.read(SUBJECT.path(tmp_path), SUBJECT) is None


@pytest.mark.parametrize("kept_ratio", [0.0, 0.01, 0.3, 0.6, 0.99])
def test_cut_off_file_is_refused(tmp_path: Path, kept_ratio: float) -> None:
    """Wherever it ends."""
    path, raw = whole(tmp_path)
    path.write_bytes(raw[: int(len(raw) * kept_ratio)])
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(path, SUBJECT)


def test_every_altered_byte_is_noticed(tmp_path: Path) -> None:
    """A digest covers all of it."""
    path, raw = whole(tmp_path)
    for i in range(len(raw)):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])
        with pytest.raises(MalformedCheckpoint):
            checkpoint.read(path, SUBJECT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "http://other:8000"),
        ("rank", 0),
        ("model_scope", "n"),
        ("model_root", "/models/n"),
        ("block_size_tokens", 64),
        ("engine_block_size_tokens", 16),
    ],
)
def test_another_subject_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    """The message says in what it differs."""
    path, _ = whole(tmp_path)
    with pytest.raises(MalformedCheckpoint, match=field):
        checkpoint.read(path, replace(SUBJECT, **{field: value}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        [],
        {},
        {"schema": 0, "subject": {}},
        {"schema": 1, "subject": []},
        {"schema": 1, "subject": 5, "position": [1, 2]},
    ],
)
def test_foreign_content_is_refused(tmp_path: Path, content: object) -> None:
    """With a right digest and wrong content: still no crash."""
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(written(tmp_path, content), SUBJECT)


@pytest.mark.parametrize("position", [[], [1], [-1, 2], ["1", 2], [1, None], None])
def test_position_must_be_one(tmp_path: Path, position: object) -> None:
    """Likewise."""
    _, raw = whole(tmp_path)
    content = msgpack.unpackb(raw[len(FORMAT) + DIGEST_BYTES :], strict_map_key=False)
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(written(tmp_path, content | {"position": position}), SUBJECT)


def test_older_format_is_refused(tmp_path: Path) -> None:
    """Another first line is another format."""
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(written(tmp_path, {}, head=b"timestable checkpoint 0\n"), SUBJECT)


def test_ranks_and_engines_have_files_of_their_own(tmp_path: Path) -> None:
    """Also where readable names would be the same."""
    subjects = [
        replace(SUBJECT, url=url, rank=rank)
        for url in ("http://a-b:1", "http://a/b:1", "https://a-b:1")
        for rank in (0, 1)
    ]
    assert len({subject.path(tmp_path) for subject in subjects}) == 6


def test_directory_is_made_or_refused(tmp_path: Path) -> None:
    """A missing one is made with its parents; what cannot be one is an error with its remedy."""
    checkpoint.check_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnwritable, match=r"checkpoint_path: .*give a directory"):
        checkpoint.check_directory(tmp_path / "file")


@pytest.mark.timeout(10)
def test_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    """In place of the checkpoint, of what is written beside it, or of the probe."""
    path = SUBJECT.path(tmp_path)
    for name in (path, path.with_suffix(".tmp"), tmp_path / f".{os.getpid()}.tmp"):
        os.mkfifo(name)
    checkpoint.check_directory(tmp_path)
    with pytest.raises(MalformedCheckpoint, match="no regular file"):
        checkpoint.read(path, SUBJECT)
    checkpoint.write(path, SUBJECT, CHECKPOINT)
    assert checkpoint.read(path, SUBJECT) == CHECKPOINT


def test_directory_in_its_place_is_unusable(tmp_path: Path) -> None:
    """Neither read nor replaced."""
    path = SUBJECT.path(tmp_path)
    path.mkdir()
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(path, SUBJECT)
    with pytest.raises(OSError, match="directory"):
        checkpoint.write(path, SUBJECT, CHECKPOINT)


def test_overlarge_file_is_not_read(tmp_path: Path) -> None:
    """Its size alone says that it is not ours."""
    path = SUBJECT.path(tmp_path)
    path.write_bytes(FORMAT)
    os.truncate(path, CHECKPOINT_BYTES_MAX + 1)
    with pytest.raises(MalformedCheckpoint, match="bytes are above"):
        checkpoint.read(path, SUBJECT)


def test_overlarge_table_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would never be read; the one before stays."""
    path, raw = whole(tmp_path)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES_MAX", len(raw) - 1)
    with pytest.raises(OSError, match="bytes are above"):
        checkpoint.write(path, SUBJECT, CHECKPOINT)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("where", ["_content", "_checkpoint"])
def test_no_memory_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A checkpoint is never a reason to end."""
    path, _ = whole(tmp_path)

    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint, where, exhausted)
    with pytest.raises(MalformedCheckpoint):
        checkpoint.read(path, SUBJECT)
