"""A process whose wall clock can be moved while it runs, by libfaketime."""

import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

LIBRARY: Final = "vendor/libfaketime/src/libfaketime.so.1"


def unavailable_reason() -> str | None:
    """Why no clock can be moved here; None when one can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the package libfaketime has its library for Linux on x86-64 only"
    if _library() is None:
        return "the package libfaketime is not installed (make setup)"
    return None


def _library() -> Path | None:
    spec = find_spec("libfaketime")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / LIBRARY
    return path if path.exists() else None


class MovableClock:
    """The wall clock of processes that are started with `environment`.

    Their monotonic clock is left alone, as it is when a machine's time is set.

    Args:
        path: file that tells them how far their clock is off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set_offset_s(0)

    @property
    def environment(self) -> dict[str, str]:
        """For processes whose clock this is; empty where there is none to be moved."""
        library = _library()
        if unavailable_reason() is not None or library is None:
            return {}
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path.absolute()),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set_offset_s(self, offset_s: int) -> None:
        """Let it be so far ahead of (or behind) the machine's from now on."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.replace(self._path)
