"""Append-only record of what was published when, for audits of predictions."""

import json
import time
from io import TextIOBase
from pathlib import Path

from indexer.contract.identifiers import InstanceId
from indexer.errors import JournalFailed
from indexer.table.changes import Changes


class Journal:
    """JSON lines; each is written once Redis has acknowledged the write it describes.

    Line: `{"published_s": wall clock, "instance_id", "engine_ts_s": newest engine batch wholly
    published or null, "oldest_engine_ts_s": oldest one in it or null, "added": [hex...],
    "removed": [hex...]}`. The operator bounds the file.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file; None keeps no journal.

        Raises:
            JournalFailed: the file cannot be written.
        """
        self._file: TextIOBase | None = None
        if path is not None:
            try:
                self._file = path.open("a", buffering=1)
            except OSError as error:
                raise JournalFailed(f"journal_path: {error}") from error

    def write(self, instance_id: InstanceId, changes: Changes) -> None:
        """Append one acknowledged write.

        Raises:
            JournalFailed: the file cannot be written.
        """
        if self._file is None:
            return
        line = {
            "published_s": time.time(),
            "instance_id": instance_id,
            "engine_ts_s": changes.engine_ts_s,
            "oldest_engine_ts_s": changes.oldest_ts_s,
            "added": [block.hex() for block in changes.added],
            "removed": [block.hex() for block in changes.removed],
        }
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise JournalFailed(f"journal_path: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
