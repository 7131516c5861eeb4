"""Members of a JSON object, found and replaced on its bytes; all others stay as they came. Pure."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BLANK: Final = re.compile(rb"[ \t\r\n]*+")
_PLAIN: Final = re.compile(rb"[^,\]} \t\r\n]*+")
_NESTED: Final = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]++|\\.)*+"|([{}\[\]]))', re.DOTALL)
"""What has to be looked at to find the end of a list or an object."""


class Member(NamedTuple):
    """Of the outermost object: its key, and where its value stands, blanks around it left out."""

    key: bytes
    start: int
    end: int


def members(body: bytes) -> Iterator[Member]:
    """Of a body that has been read as a JSON object before, in order.

    A repeated key comes each time: which one counts is the reader's business.
    """
    at = _skip(body, body.index(b"{") + 1)
    while (named := _STRING.match(body, at)) is not None:
        colon = body.index(b":", named.end())
        start = _skip(body, colon + 1)
        end = _value_end(body, start)
        yield Member(json.loads(named[0]).encode("utf-8", "surrogatepass"), start, end)
        at = _skip(body, _skip(body, end) + 1)  # a comma, or the end of the object


def spans(body: bytes, key: bytes) -> Iterator[tuple[int, int]]:
    """Where values of this key stand."""
    return ((one.start, one.end) for one in members(body) if one.key == key)


def with_members(body: bytes, put: Mapping[bytes, bytes], drop: Collection[bytes] = ()) -> bytes:
    """The object with these members first, and without others of their names and of those to drop.

    Args:
        body: has been read as a JSON object before.
        put: key, which needs no escapes -> value as JSON; at least one.
        drop: keys.
    """
    assert put, "the first member that stays would begin with a comma"
    opened = body.index(b"{") + 1
    pieces = [b", ".join(b'"%b": %b' % member for member in put.items())]
    at = opened
    for member in members(body):
        if member.key not in put and member.key not in drop:
            # Behind the first one a piece begins with the comma in front of it.
            pieces.append((b", " if at == opened else b"") + body[at : member.end])
        at = member.end
    return body[:opened] + b"".join(pieces) + body[at:]


def replaced(body: bytes, places: list[tuple[int, int]], value: bytes) -> bytes:
    """The body with this value at all these places."""
    pieces, at = [], 0
    for start, end in places:
        pieces += [body[at:start], value]
        at = end
    return b"".join((*pieces, body[at:]))


def _skip(body: bytes, at: int) -> int:
    found = _BLANK.match(body, at)
    assert found is not None, "no blank at all matches"
    return found.end()


def _value_end(body: bytes, start: int) -> int:
    if body[start : start + 1] not in {b"{", b"["}:
        found = _STRING.match(body, start) or _PLAIN.match(body, start)
        assert found is not None, "the empty value matches"
        return found.end()
    depth = 0
    for found in _NESTED.finditer(body, start):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[1], 0)
        if depth == 0:
            return found.end()
    raise AssertionError("the body has been read as JSON")
