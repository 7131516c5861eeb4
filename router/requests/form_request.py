"""Audio in a form: the fields beside the file are read, the file itself is not."""

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

_BOUNDARY: Final = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME: Final = re.compile(rb'[;\s]name="([^"]{1,128})"', re.IGNORECASE)


def parse_form(received: Received) -> ApiCall:
    """`/v1/audio/transcriptions` and `/v1/audio/translations`; see `received.Parse`.

    What is generated starts from the sound, whose keys and values no other request shares.
    """
    fields = dict(_fields(received))
    stream = fields.get(b"stream", b"").strip().lower()
    return received.call(
        model=_text(fields.get(b"model", b""), "model"),
        stream=stream in {b"1", b"true", b"on", b"yes"},
        prompt=OpaquePrompt(pieces=(), media_count=1),
        prompt_field="file",
        reads_prefixes=False,
    )


def _fields(received: Received) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of the short parts; the first of a name counts last, as in the engine."""
    content_type = received.headers.get("Content-Type", "")
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise RequestInvalid(
            "Content-Type: must be multipart/form-data with a boundary; send the file in a form.",
            param="Content-Type",
        )
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    body, parts = received.body, 0
    at = 0 if body.startswith(mark) else _next(body, b"\r\n" + mark, 0, 2)
    while at >= 0 and not body.startswith(b"--", at + len(mark)):
        parts += 1
        if parts > PARTS_MAX:
            raise RequestInvalid(f"The form has more than {PARTS_MAX} parts. Send fewer.")
        start = at + len(mark)
        head_end = body.find(b"\r\n\r\n", start, start + HEADER_BYTES_MAX)
        if head_end < 0:
            break
        end = body.find(b"\r\n" + mark, head_end + 2)
        if end < 0:
            break
        name = _NAME.search(body, start, head_end)
        if name is not None and end - head_end - 4 <= FIELD_BYTES_MAX:
            yield name[1], body[head_end + 4 : end]
        at = end + 2
    else:
        if at >= 0:
            return
    raise RequestInvalid("The form is not complete: its last part has no end. Send it whole.")


def _next(body: bytes, mark: bytes, start: int, skip: int) -> int:
    found = body.find(mark, start)
    return found if found < 0 else found + skip


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise invalid(name, "must be UTF-8") from None
