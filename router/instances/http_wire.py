"""HTTP/1.1 as engines speak it: heads and chunks to values, and the other way round. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

HEAD_BYTES_MAX: Final = 64 * 1024
"""Status line and headers of an answer."""

CHUNK_LINE_BYTES_MAX: Final = 4096
"""A chunk's size with its extensions; also all trailers together."""

CHUNK_BYTES_MAX: Final = 1 << 32

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,16}")
"""`int` would take signs, spaces, underscores and `0x` too."""

SHORT_SIZES: Final = {b"%x" % size: size for size in range(1, 4096)}
"""Of chunks as a token or some bring them, by how they are told."""

_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""In no header's value; tabs may be."""

BREAK: Final = b"\r\n"
"""Behind each line, and behind a chunk's payload."""

_BODYLESS_STATUSES: Final = frozenset({204, 304})
_INFORMATIONAL: Final = range(100, 200)
SWITCHING: Final = 101
"""What follows the head is of another protocol, in both directions."""

WEBSOCKET: Final = "websocket"
"""The only protocol that is asked for; any other `Upgrade` of a client is not passed on."""


class BadAnswer(ConnectionError):  # noqa: N818 - named as what happened, like all of ours
    """What came is no answer in HTTP/1.1; the connection is of no more use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an instance listens.

    Attributes:
        host: name or address.
        port: TCP.
        tls: whether it is spoken.
        authority: as the Host header has it.
        prefix: in front of every path.
    """

    host: str
    port: int
    tls: bool
    authority: str
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Origin":
        """Of an instance's URL.

        Raises:
            ValueError: it is no http(s) URL.
        """
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if parts.hostname is None or not (tls or parts.scheme == "http"):
            raise ValueError(f"`{url}` is not like http://HOST:PORT")
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            authority=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """Status and headers of an answer, and how its body is framed.

    Attributes:
        status: HTTP status.
        headers: all, in order.
        chunked: the body comes in chunks.
        length_bytes: of the body, where told; None and not chunked: it ends with the connection.
        keeps_alive: another request may follow on the connection.
    """

    status: int
    headers: list[tuple[str, str]]
    chunked: bool
    length_bytes: int | None
    keeps_alive: bool


def request_head(
    method: str, path: str, authority: str, headers: Iterable[tuple[str, str]], length: int | None
) -> bytes:
    """Request line and headers.

    Args:
        method: as the client's.
        path: with query, as it goes on the wire.
        authority: for the Host header.
        headers: end-to-end headers.
        length: of the body in bytes; None: there is none and none is told.

    Raises:
        ValueError: a header holds a line break.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError("a header holds a line break")
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n"


def parse_head(head: bytes, *, to_head: bool, to_upgrade: bool = False) -> AnswerHead | None:
    """Status line and headers, without the empty line behind them; None: an interim answer.

    Args:
        head: what came.
        to_head: the request was a HEAD, whose answer has no body.
        to_upgrade: the request asked to go on as a WebSocket.

    Raises:
        BadAnswer: it is none.
    """
    first, *lines = head.split(b"\r\n")
    matched = _STATUS_LINE.fullmatch(first)
    if matched is None:
        raise BadAnswer("no status line")
    status = int(matched[2])
    if status == SWITCHING:
        return _switched([_header(line) for line in lines], to_upgrade=to_upgrade)
    if status in _INFORMATIONAL:
        return None
    headers = [_header(line) for line in lines]
    codings = _told(headers, "transfer-encoding")
    lengths = _told(headers, "content-length")
    if len(codings) + len(lengths) > 1 or (codings and codings[0].lower() != "chunked"):
        raise BadAnswer("the body's framing is ambiguous")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise BadAnswer("Content-Length is no number")
    bodyless = to_head or status in _BODYLESS_STATUSES
    options = {one.strip() for one in ",".join(_told(headers, "connection")).lower().split(",")}
    keeps = "close" not in options and (matched[1] == b"1" or "keep-alive" in options)
    return AnswerHead(
        status=status,
        headers=headers,
        chunked=bool(codings) and not bodyless,
        length_bytes=0 if bodyless else int(lengths[0]) if lengths else None,
        keeps_alive=keeps,
    )


def _switched(headers: list[tuple[str, str]], *, to_upgrade: bool) -> AnswerHead:
    """The connection is a WebSocket from here on, and ends with it."""
    protocols = [value.lower() for value in _told(headers, "upgrade")]
    if not to_upgrade or protocols != [WEBSOCKET]:
        raise BadAnswer("it speaks another protocol")
    return AnswerHead(
        status=SWITCHING, headers=headers, chunked=False, length_bytes=None, keeps_alive=False
    )


def _told(headers: list[tuple[str, str]], wanted: str) -> list[str]:
    """All values of a header; which of several another reader would take, nobody knows."""
    return [value for name, value in headers if name.lower() == wanted]


def _header(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
        raise BadAnswer("a header is none")
    return name.decode(), value.strip(b" \t").decode("utf-8", "surrogateescape")


def readable(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Values that are not UTF-8 as Latin-1: the server library would drop their letters."""
    if all(value.isascii() for _, value in headers):
        return headers
    raw = [(name, value.encode("utf-8", "surrogateescape")) for name, value in headers]
    return [(name, _text(value)) for name, value in raw]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def chunk(payload: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


class ChunkedDecoder:
    """A chunked body, piece by piece.

    Attributes:
        ended: the last chunk and the trailers, which are dropped, are here.
        surplus: bytes have come behind the end.
    """

    __slots__ = ("_held", "_left", "_trailers_bytes", "ended", "surplus")

    def __init__(self) -> None:
        self.ended = False
        self.surplus = False
        self._held = b""
        self._left = 0  # of the chunk and the line break behind it
        self._trailers_bytes: int | None = None

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk."""
        return not self._left and not self._held and self._trailers_bytes is None

    def feed(self, data: bytes) -> bytes:
        """The payload of what has come.

        Raises:
            BadAnswer: it is not chunked.
        """
        data = self._held + data if self._held else data
        self._held = b""
        at = 0
        payload: list[bytes] = []
        while at < len(data) and not self.ended:
            if self._left:
                at = self._take(data, at, payload)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._held = data[at:]
                if len(self._held) > CHUNK_LINE_BYTES_MAX:
                    raise BadAnswer("a chunk has no size")
                return b"".join(payload)
            self._line(data[at:end])
            at = end + 2
        self.surplus = self.surplus or at < len(data)
        return b"".join(payload)

    def _take(self, data: bytes, at: int, payload: list[bytes]) -> int:
        """What is here of a chunk and the line break behind it; where the next thing begins."""
        size = self._left - len(BREAK)
        if size > 0:
            payload.append(data[at : at + size])
            self._left -= len(payload[-1])
            at += len(payload[-1])
        while at < len(data) and 0 < self._left <= len(BREAK):
            if data[at] != BREAK[-self._left]:
                raise BadAnswer("a chunk is longer than told")
            self._left -= 1
            at += 1
        return at

    def _line(self, line: bytes) -> None:
        """A chunk's size, or one of the trailers behind the last chunk."""
        if self._trailers_bytes is not None:
            self._trailers_bytes += len(line) + len(BREAK)
            if self._trailers_bytes > CHUNK_LINE_BYTES_MAX:
                raise BadAnswer("trailers without end")
            self.ended = not line
            return
        digits = line.partition(b";")[0].rstrip(b" \t")
        if not _CHUNK_SIZE.fullmatch(digits):
            raise BadAnswer("a chunk's size is no number")
        size = int(digits, 16)
        if size > CHUNK_BYTES_MAX:
            raise BadAnswer("a chunk is too long")
        if size:
            self._left = size + len(BREAK)
        else:
            self._trailers_bytes = 0
