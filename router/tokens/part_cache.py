"""Token ids of texts that were tokenized before, bounded in bytes."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

ENTRY_BYTES: Final = 160
"""What an entry takes beside its text and ids."""


class PartCache:
    """Text -> packed token ids; the least recently used goes first. Safe in several threads.

    Args:
        bytes_max: texts, ids and what holds them together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Held now."""
        return self._bytes

    def get(self, texts: Sequence[str]) -> list[bytes | None]:
        """Packed ids of each text, None where they are not known."""
        held, touch = self._held.get, self._held.move_to_end
        found = []
        with self._lock:
            for text in texts:
                ids = held(text)
                if ids is not None:
                    touch(text)
                found.append(ids)
        return found

    def put(self, new: Mapping[str, bytes]) -> None:
        """Remember these; one too large for the bound is left out."""
        with self._lock:
            for text, ids in new.items():
                size = _size(text, ids)
                if size > self._bytes_max or text in self._held:
                    continue
                self._held[text] = ids
                self._bytes += size
            while self._bytes > self._bytes_max:
                text, ids = self._held.popitem(last=False)
                self._bytes -= _size(text, ids)


def _size(text: str, ids: bytes) -> int:
    return sys.getsizeof(text) + len(ids) + ENTRY_BYTES
