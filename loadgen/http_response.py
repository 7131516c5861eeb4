"""Pure: takes an HTTP/1.1 answer apart as its bytes arrive.

Written for its cost: a streamed token arrives as one small chunk, so a chunk that is complete in
what was received is handed on with two slices and no copy of what came before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, assert_never

HEAD_BYTES_MAX = 64 << 10
CHUNK_LINE_BYTES_MAX = 1 << 10
CHUNK_BYTES_MAX = 1 << 30

_BODILESS_STATUSES = (204, 304)
_CRLF_BYTES = 2
_STATUS_DIGITS = 3
_FINAL_STATUS_MIN = 200
_LENGTH_DIGITS_MAX = 15  # a petabyte: more than any body


class FramingError(Exception):
    """The bytes are no HTTP/1.1 answer; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """Status and headers (names in lower case; the last of equal names wins)."""

    status: int
    headers: Mapping[str, str]


class Receiver(Protocol):
    """Gets one answer. Its methods are called from the event loop and must not block."""

    def on_head(self, head: ResponseHead) -> None:
        """The head arrived."""

    def on_body(self, piece: bytes, now_s: float) -> None:
        """A piece of the body arrived at `now_s`; raising ends the exchange with that error."""


class _State(Enum):
    HEAD = auto()
    CHUNKS = auto()
    TRAILERS = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()
    FINISHED = auto()


class ResponseParser:
    """One answer, framed by chunks, by a length, or by the end of the connection.

    Args:
        receiver: gets the head and the body.
    """

    __slots__ = ("_left_bytes", "_receiver", "_rest", "_state", "keep_alive")

    def __init__(self, receiver: Receiver) -> None:
        self.keep_alive = True
        self._receiver = receiver
        self._state = _State.HEAD
        self._rest = b""  # bytes of an incomplete head, chunk line or trailer
        self._left_bytes = 0  # of the body; of a chunk together with the CRLF after it

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take received bytes; True when the answer is complete.

        Raises:
            FramingError: no HTTP/1.1, or bytes after the end of the answer.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        elif self._state is _State.CHUNKS and self._take_whole_chunk(data, now_s):
            return False
        while data and self._state is not _State.FINISHED:
            data = self._take(data, now_s)
        if data:
            raise FramingError(f"bytes after the end of the answer: {data[:80]!r}")
        return self._state is _State.FINISHED

    def end_of_connection(self) -> bool:
        """The server closed the connection; whether the answer is complete by that."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.FINISHED
        return self._state is _State.FINISHED

    def _take(self, data: bytes, now_s: float) -> bytes:
        """Take what belongs to the present state; returns the bytes after it."""
        match self._state:
            case _State.HEAD:
                return self._take_head(data)
            case _State.CHUNKS:
                return self._take_chunks(data, now_s)
            case _State.TRAILERS:
                return self._take_trailers(data)
            case _State.LENGTH:
                piece = data[: self._left_bytes]
                self._left_bytes -= len(piece)
                self._receiver.on_body(piece, now_s)
                if self._left_bytes == 0:
                    self._state = _State.FINISHED
                return data[len(piece) :]
            case _State.UNTIL_CLOSE:
                self._receiver.on_body(data, now_s)
                return b""
            case _State.FINISHED:
                return data
            case unknown:
                assert_never(unknown)

    def _take_head(self, data: bytes) -> bytes:
        """Read status line and headers; returns the bytes after them."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return self._keep(data, HEAD_BYTES_MAX)
        head = _parse_head(data[:end])
        data = data[end + 4 :]
        if head.status < _FINAL_STATUS_MIN:  # e.g. 100 Continue: the answer proper follows
            return data
        self._receiver.on_head(head)
        self.keep_alive = head.headers.get("connection", "").lower() != "close"
        length = head.headers.get("content-length")
        if head.status in _BODILESS_STATUSES or length == "0":
            self._state = _State.FINISHED
        elif head.headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = _State.CHUNKS
        elif length is None:
            self._state = _State.UNTIL_CLOSE
            self.keep_alive = False
        else:
            self._state = _State.LENGTH
            self._left_bytes = _body_bytes(length)
        return data

    def _take_whole_chunk(self, data: bytes, now_s: float) -> bool:
        """Hand on `data` if it is exactly one chunk, as nearly every read of a stream is."""
        start = data.find(b"\r\n") + _CRLF_BYTES
        end = len(data) - _CRLF_BYTES
        if self._left_bytes > 0 or not _CRLF_BYTES < start < end:
            return False
        if _chunk_bytes(data[: start - _CRLF_BYTES]) != end - start:
            return False
        self._receiver.on_body(data[start:end], now_s)
        return True

    def _take_chunks(self, data: bytes, now_s: float) -> bytes:
        """Hand on the payload of the chunks in `data`; returns what follows the last of them."""
        position, size = 0, len(data)
        while position < size:
            if self._left_bytes == 0:
                end = data.find(b"\r\n", position)
                if end < 0:
                    return self._keep(data[position:], CHUNK_LINE_BYTES_MAX)
                payload_bytes = _chunk_bytes(data[position:end])
                position = end + _CRLF_BYTES
                if payload_bytes == 0:
                    self._state = _State.TRAILERS
                    return data[position:]
                self._left_bytes = payload_bytes + _CRLF_BYTES
            take = min(self._left_bytes, size - position)
            payload_bytes = min(take, self._left_bytes - _CRLF_BYTES)
            if payload_bytes > 0:
                self._receiver.on_body(data[position : position + payload_bytes], now_s)
            position += take
            self._left_bytes -= take
        return b""

    def _take_trailers(self, data: bytes) -> bytes:
        """Skip a line; the empty one ends the answer."""
        end = data.find(b"\r\n")
        if end < 0:
            return self._keep(data, CHUNK_LINE_BYTES_MAX)
        if end == 0:
            self._state = _State.FINISHED
        return data[end + _CRLF_BYTES :]

    def _keep(self, data: bytes, bytes_max: int) -> bytes:
        """Remember an incomplete line until more arrives."""
        if len(data) > bytes_max:
            raise FramingError(f"a head or chunk line of more than {bytes_max} bytes")
        self._rest = data
        return b""


def _chunk_bytes(line: bytes) -> int:
    try:
        payload_bytes = int(line.partition(b";")[0], 16)
    except ValueError:
        payload_bytes = -1
    if not 0 <= payload_bytes <= CHUNK_BYTES_MAX:
        raise FramingError(f"bad chunk size {line[:40]!r}")
    return payload_bytes


def _body_bytes(length: str) -> int:
    if not (length.isascii() and length.isdecimal()) or len(length) > _LENGTH_DIGITS_MAX:
        raise FramingError(f"bad content-length {length[:40]!r}")
    return int(length)


def _parse_head(head: bytes) -> ResponseHead:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    status = rest.split(" ", 1)[0]
    if not version.startswith("HTTP/1.") or not (
        len(status) == _STATUS_DIGITS and status.isascii() and status.isdecimal()
    ):
        raise FramingError(f"not an HTTP/1.1 answer: {head[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return ResponseHead(status=int(status), headers=headers)
