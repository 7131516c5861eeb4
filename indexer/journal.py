"""Append-only record of what was published when, for audits of predictions."""

import json
import time
from io import TextIOBase
from pathlib import Path

from indexer.changes import Changes
from indexer.contract.identifiers import InstanceId


class Journal:
    """JSON lines; each is written once Redis has acknowledged the write it describes.

    Line: `{"published_s": wall clock, "instance_id", "engine_ts": newest engine batch wholly
    published or null, "added": [hex...], "removed": [hex...]}`. The operator bounds the file.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file; None keeps no journal.

        Raises:
            OSError: the file cannot be written.
        """
        self._file: TextIOBase | None = path.open("a", buffering=1) if path is not None else None

    def write(self, instance_id: InstanceId, changes: Changes) -> None:
        """Append one acknowledged write."""
        if self._file is None:
            return
        line = {
            "published_s": time.time(),
            "instance_id": instance_id,
            "engine_ts": changes.engine_ts_s,
            "added": [block.hex() for block in changes.added],
            "removed": [block.hex() for block in changes.removed],
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
