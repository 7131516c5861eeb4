"""Files to be written: checked before the work whose result they take, then written whole."""

import os
from pathlib import Path

from loadgen.errors import OutputError


def check_output(option: str, path: Path | str) -> None:
    """Make the file's directory, and make sure that the file can be written.

    An existing file stays as it is, an absent one stays absent.

    Raises:
        OutputError: option and reason.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise OutputError(option, f"{path} is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not os.access(path, os.W_OK):
                raise OutputError(option, f"{path} is not writable")
            return
        # Only creating it tells: permissions say nothing of read-only and foreign file systems.
        path.touch()
        path.unlink()
    except (OSError, ValueError) as exc:
        raise OutputError(option, f"{path} cannot be written: {exc}") from exc


def write_whole(option: str, path: Path, text: str) -> None:
    """Write a file so that it is there whole, or as it was before.

    Raises:
        OutputError: option and reason, such as a full disk.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise OutputError(option, f"{path} cannot be written: {exc}") from exc
