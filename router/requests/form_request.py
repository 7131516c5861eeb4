"""Audio in a form: the fields beside the file are read, the file itself is not.

Which model a form names decides who may send it and where it goes, so the engine must read the same
one. What two readers of forms could take for different things is refused, however unlikely.
"""

import re
from collections.abc import Iterator
from typing import Final

from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, OpaquePrompt
from router.requests.body_fields import invalid
from router.requests.received import Received

PARTS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 1024
HEADER_BYTES_MAX: Final = 4096
BOUNDARY_BYTES_MAX: Final = 70

_FORM: Final = b"multipart/form-data"
_CHARSETS: Final = (b"utf-8", b"us-ascii")
"""In others the engine might read another name."""

_PARAMETER: Final = re.compile(
    rb""";[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]++)=(?:"((?:[^"\\\r\n]++|\\.)*+)"|([^\s;"]*+))[ \t]*"""
)
_DISPOSITION: Final = b"content-disposition:"

Span = tuple[int, int]


def parse_form(received: Received) -> ApiCall:
    """`/v1/audio/transcriptions` and `/v1/audio/translations`; see `received.Parse`.

    What is generated starts from the sound, whose keys and values no other request shares.
    """
    body = received.body
    content_type = received.headers.get("Content-Type", "")
    fields = {name: body[start:end] for name, (start, end) in form_fields(body, content_type)}
    stream = fields.get(b"stream", b"").strip().lower()
    return received.call(
        model=_text(fields.get(b"model", b""), "model"),
        stream=stream in {b"1", b"true", b"on", b"yes"},
        prompt=OpaquePrompt(pieces=(), media_count=1),
        prompt_field="file",
        reads_prefixes=False,
    )


def form_fields(body: bytes, content_type: str) -> Iterator[tuple[bytes, Span]]:
    """Names of the short parts, and where their values stand; of a repeated one the last counts.

    Raises:
        RequestInvalid: it is no form, not a whole one, or can be read in more than one way.
    """
    mark = b"--" + _boundary(content_type.encode("latin-1", "replace"))
    parts = 0
    at = 0 if body.startswith(mark) else _next(body, b"\r\n" + mark, 0, 2)
    while at >= 0 and not body.startswith(b"--", at + len(mark)):
        parts += 1
        if parts > PARTS_MAX:
            raise RequestInvalid(f"The form has more than {PARTS_MAX} parts. Send fewer.")
        start = at + len(mark) + 2
        if body[start - 2 : start] not in {b"\r\n", b"\r", b""}:
            raise RequestInvalid("The form's boundary stands within a part. Send another one.")
        head_end = body.find(b"\r\n\r\n", start, start + HEADER_BYTES_MAX)
        if head_end < 0:
            break
        end = body.find(b"\r\n" + mark, head_end + 2)
        if end < 0:
            break
        name = _name(body[start:head_end])
        if end - head_end - 4 <= FIELD_BYTES_MAX:
            yield name, (head_end + 4, end)
        at = end + 2
    else:
        if at >= 0:
            return
    raise RequestInvalid("The form is not complete: its last part has no end. Send it whole.")


def _boundary(content_type: bytes) -> bytes:
    kind, semicolon, rest = content_type.partition(b";")
    parameters = _parameters(semicolon + rest)
    boundary = (parameters or {}).get(b"boundary", b"")
    if kind.strip().lower() != _FORM or not 0 < len(boundary) <= BOUNDARY_BYTES_MAX:
        raise RequestInvalid(
            "Content-Type: must be multipart/form-data with a boundary; send the file in a form.",
            param="Content-Type",
        )
    charset = (parameters or {}).get(b"charset", b"utf-8")
    if charset.lower() not in _CHARSETS:
        raise RequestInvalid("Content-Type: the charset of a form must be utf-8.")
    return boundary


def _name(head: bytes) -> bytes:
    """Of a part, by its headers."""
    lines = head.split(b"\r\n")
    found = [line for line in lines if line.lower().startswith(_DISPOSITION)]
    well_formed = all(line[:1].strip() and not {*b"\r\n"} & {*line} for line in lines)
    if well_formed and len(found) == 1:
        kind, semicolon, rest = found[0][len(_DISPOSITION) :].partition(b";")
        parameters = _parameters(semicolon + rest)
        if kind.strip().lower() == b"form-data" and parameters is not None:
            name = parameters.get(b"name")
            if name is not None:
                return name
    raise RequestInvalid(
        "A part of the form has no clear name. Send each with one header line: "
        'Content-Disposition: form-data; name="NAME".'
    )


def _parameters(written: bytes) -> dict[bytes, bytes] | None:
    """Of a header; None where they are not well-formed, where one is repeated, or escaped.

    The name of a file may be escaped: nothing here reads it.
    """
    parameters: dict[bytes, bytes] = {}
    written, at = written.rstrip(b" \t;"), 0
    while at < len(written):
        found = _PARAMETER.match(written, at)
        if found is None:
            return None
        name, value = found[1].lower(), found[3] if found[2] is None else found[2]
        if name in parameters or (b"\\" in value and name != b"filename"):
            return None
        parameters[name] = value
        at = found.end()
    return parameters


def _next(body: bytes, mark: bytes, start: int, skip: int) -> int:
    found = body.find(mark, start)
    return found if found < 0 else found + skip


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise invalid(name, "must be UTF-8") from None
