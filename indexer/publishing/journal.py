"""Append-only record of what was published when, for audits of predictions."""

import json
import time
from collections.abc import Sequence
from io import TextIOBase
from pathlib import Path

from indexer.contract.identifiers import BlockHash, InstanceId
from indexer.errors import JournalFailed
from indexer.table.changes import Changes, Unseen


class Journal:
    """JSON lines; each is written once Redis has acknowledged the write it describes.

    Line: `{"published_s": wall clock, "instance_id", "engine_ts_s": newest engine batch wholly
    published or null, "oldest_engine_ts_s": oldest one in it or null, "added": [hex...],
    "removed": [hex...]}`. The operator bounds the file.

    Blocks whose change was over before it was written are told at once, in a line of their own that
    has neither added nor removed ones: `"came_back": [hex...]` were in the index all the time and
    not in the engine for a while, `"came_and_went": [hex...]` the other way round.
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
        self._append(
            instance_id,
            changes.engine_ts_s,
            changes.oldest_ts_s,
            added=changes.added,
            removed=changes.removed,
        )

    def write_unseen(
        self,
        instance_id: InstanceId,
        unseen: Sequence[Unseen],
        *,
        engine_ts_s: float | None = None,
        oldest_ts_s: float | None,
    ) -> None:
        """Append what cancelled out just now, if anything did.

        Args:
            instance_id: whose blocks.
            unseen: in the order they came.
            engine_ts_s: engine batch that ended it; None when unknown.
            oldest_ts_s: oldest engine batch that may have begun it; None when unknown.

        Raises:
            JournalFailed: the file cannot be written.
        """
        came_back = [block for one in unseen for block in one.came_back]
        came_and_went = [block for one in unseen for block in one.came_and_went]
        if came_back or came_and_went:
            self._append(
                instance_id,
                engine_ts_s,
                oldest_ts_s,
                added=(),
                removed=(),
                came_back=came_back,
                came_and_went=came_and_went,
            )

    def _append(
        self,
        instance_id: InstanceId,
        engine_ts_s: float | None,
        oldest_ts_s: float | None,
        **blocks: Sequence[BlockHash],
    ) -> None:
        if self._file is None:
            return
        line: dict[str, object] = {
            "published_s": time.time(),
            "instance_id": instance_id,
            "engine_ts_s": engine_ts_s,
            "oldest_engine_ts_s": oldest_ts_s,
        }
        line |= {name: [block.hex() for block in own] for name, own in blocks.items()}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise JournalFailed(f"journal_path: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
