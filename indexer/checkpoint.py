"""A rank's holdings in a file, so that a sidecar started again need not begin with nothing.

A file is a line that names the format, a digest, and one msgpack map. It is written beside its
place and renamed into it, so it is whole or absent; what cannot be read is never more than a reason
to begin without it. Whether it is still about the same engine process only that engine's ring can
tell (`Subscriber`).
"""

import errno
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import xxhash

from indexer.contract.limits import SCHEMA_VERSION
from indexer.engine.history import Position
from indexer.errors import CheckpointUnwritable, MalformedCheckpoint
from indexer.table.holdings import Saved

FORMAT: Final = b"timestable checkpoint 1\n"
DIGEST_BYTES: Final = 16
SUFFIX: Final = ".checkpoint"
UNREADABLE: Final = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    MemoryError,
)
CHECKPOINT_BYTES_MAX: Final = 1 << 30
"""Some ten million blocks of a hundred bytes, more than an engine holds; it is read as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a checkpoint is about; it is used for nothing else.

    Attributes:
        url: the engine as routers reach it.
        rank: data-parallel rank.
        model_scope: of the fleet.
        model_root: where the engine's model comes from.
        block_size_tokens: of the fleet.
        engine_block_size_tokens: of the engine.
    """

    url: str
    rank: int
    model_scope: str
    model_root: str
    block_size_tokens: int
    engine_block_size_tokens: int

    def path(self, directory: Path) -> Path:
        """Where its checkpoint is: a name for people, and a digest that tells all ranks apart."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.url.partition("://")[2])[:80]
        digest = xxhash.xxh3_64_hexdigest(f"{self.url} {self.rank}".encode())
        return directory / f"{readable}-{self.rank}-{digest}{SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Holdings, and the batch behind which they were so."""

    position: Position
    saved: Saved


def check_directory(directory: Path) -> None:
    """Make the directory if need be, and see that files can be written there.

    Raises:
        CheckpointUnwritable: they cannot; the message says what to change.
    """
    probe = directory / f".{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _new_file(probe) as file:
            file.write(FORMAT)
        probe.unlink()
    except OSError as error:
        raise CheckpointUnwritable(
            f"checkpoint_path: {directory} cannot be written ({error.strerror}): give a directory "
            "of this sidecar's own, or leave the option out"
        ) from error


def _new_file(path: Path) -> BinaryIO:
    """A file in place of whatever has that name: to open a pipe might wait for ever."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def write(path: Path, subject: Subject, checkpoint: Checkpoint) -> int:
    """Replace a checkpoint; returns its bytes.

    Raises:
        OSError: the disk does not take it, or it is too large; the one before stays.
    """
    content = msgpack.packb(
        {
            "schema": SCHEMA_VERSION,
            "subject": asdict(subject),
            "position": list(checkpoint.position),
            "completeness": checkpoint.saved.completeness,
            "table": checkpoint.saved.table,
        }
    )
    size_bytes = len(FORMAT) + DIGEST_BYTES + len(content)
    if size_bytes > CHECKPOINT_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{size_bytes} bytes are above {CHECKPOINT_BYTES_MAX}")
    beside = path.with_suffix(".tmp")
    with _new_file(beside) as file:
        file.write(FORMAT)
        file.write(xxhash.xxh3_128_digest(content))
        file.write(content)
    beside.replace(path)
    return size_bytes


def read(path: Path, subject: Subject) -> Checkpoint | None:
    """The checkpoint of a subject; None when there is none.

    Raises:
        MalformedCheckpoint: it cannot be used; the message says why.
    """
    try:
        raw = _content(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MalformedCheckpoint(f"it cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise MalformedCheckpoint("there is no memory for it") from error
    if not raw.startswith(FORMAT):
        raise MalformedCheckpoint(f"it does not begin with {FORMAT!r}")
    content = memoryview(raw)[len(FORMAT) + DIGEST_BYTES :]
    if raw[len(FORMAT) : len(FORMAT) + DIGEST_BYTES] != xxhash.xxh3_128_digest(content):
        raise MalformedCheckpoint("its digest is another one: it was cut off or altered")
    try:
        return _checkpoint(msgpack.unpackb(content, strict_map_key=False, use_list=True), subject)
    except (*UNREADABLE, msgpack.UnpackException) as error:
        raise MalformedCheckpoint(f"it is no checkpoint: {error!r}") from error


def _content(path: Path) -> bytes:
    """All of a regular file; nothing else is read, nor waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedCheckpoint("it is no regular file")
        if status.st_size > CHECKPOINT_BYTES_MAX:
            raise MalformedCheckpoint(
                f"its {status.st_size} bytes are above {CHECKPOINT_BYTES_MAX}"
            )
        return file.read(status.st_size)


def _checkpoint(content: Any, subject: Subject) -> Checkpoint:
    told, expected = content["subject"], asdict(subject)
    if content["schema"] != SCHEMA_VERSION:
        raise MalformedCheckpoint(f"it is of schema {content['schema']!r}, not {SCHEMA_VERSION}")
    if told != expected:
        names = [name for name, value in expected.items() if told.get(name) != value]
        raise MalformedCheckpoint(f"it is about another {', '.join(names)}")
    sequence, digest = content["position"]
    if type(sequence) is not int or type(digest) is not int or sequence < 0:
        raise ValueError("no position")
    saved = Saved(sequence=sequence, table=content["table"], completeness=content["completeness"])
    return Checkpoint(position=Position(sequence, digest), saved=saved)
