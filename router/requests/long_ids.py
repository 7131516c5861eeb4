"""Token ids by the hundred thousand, read without holding up other threads. Pure.

A JSON reader holds the interpreter's lock for the whole of a body, some 20 ms for each megabyte of
ids, and nothing else of the process goes on. So a long list of ids is cut out first and converted
piece by piece.
"""

import re
from typing import Final

from indexer.contract.block_hash import pack_tokens

LONG_BYTES: Final = 64 * 1024
"""Lists shorter than this are read with the rest of their body."""

PIECE_BYTES: Final = 8 * 1024

STAND_IN: Final = "\x00ids"
"""What stands in a body in place of a list."""

_LISTS: Final = {
    field: re.compile(
        rb'"%s"(?<!\\"%s")[ \t\r\n]*+:[ \t\r\n]*+\[([0-9, \t\r\n]{%d,}+)\]'
        % (field.encode(), field.encode(), LONG_BYTES)
    )
    for field in ("prompt", "input", "token_ids")
}
"""By name of the field; inside a text the quotes around a name are escaped."""


class LongIds:
    """A long list of ids, still as it was written."""

    __slots__ = ("_written",)

    def __init__(self, written: bytes) -> None:
        self._written = written

    def packed(self) -> bytes:
        """As little-endian u32.

        Raises:
            ValueError: something between two commas is no integer.
            OverflowError: one does not fit 32 bits.
        """
        written, at, pieces = self._written, 0, []
        while at <= len(written):
            end = written.find(b",", at + PIECE_BYTES)
            end = len(written) if end < 0 else end
            pieces.append(pack_tokens([int(one) for one in written[at:end].split(b",")]))
            at = end + 1
        return b"".join(pieces)


def set_aside(body: bytes) -> tuple[bytes, dict[str, LongIds]]:
    """The body with stand-ins for its long lists of ids, and these by the name of their field."""
    if len(body) < LONG_BYTES:
        return body, {}
    lists: dict[str, LongIds] = {}
    for field, pattern in _LISTS.items():
        found = pattern.search(body)
        if found is not None:
            lists[field] = LongIds(found[1])
            body = (
                body[: found.start()]
                + b'"%s":["\\u0000ids"]' % field.encode()
                + body[found.end() :]
            )
    return body, lists


def put_back(fields: dict[str, object], lists: dict[str, LongIds]) -> None:
    """Lists in place of their stand-ins; one that stood deeper in the body nobody reads."""
    for name, ids in lists.items():
        if fields.get(name) == [STAND_IN]:
            fields[name] = ids
