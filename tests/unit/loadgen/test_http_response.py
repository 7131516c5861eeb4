"""The HTTP/1.1 parser: framing, limits, and indifference to how the bytes were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.http_response import HEAD_BYTES_MAX, FramingError, ResponseHead, ResponseParser


class _Collected:
    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []
        self.body = b""

    def on_head(self, head: ResponseHead) -> None:
        self.heads.append(head)

    def on_body(self, piece: bytes, _now_s: float) -> None:
        self.body += piece


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)


def _parse(*pieces: bytes) -> tuple[_Collected, ResponseParser, bool]:
    collected = _Collected()
    parser = ResponseParser(collected)
    finished = [parser.feed(piece, 0.0) for piece in pieces]
    return collected, parser, finished[-1]


@given(cuts=st.lists(st.integers(0, len(CHUNKED)), max_size=10))
def test_chunked_body_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """Any cut: before, inside and after a chunk line, a payload, a CRLF."""
    edges = [0, *sorted(cuts), len(CHUNKED)]
    pieces = [CHUNKED[a:b] for a, b in pairwise(edges) if a < b]
    collected, parser, finished = _parse(*pieces)
    assert (collected.body, finished, parser.keep_alive) == (b"hello 0123456789", True, True)
    assert collected.heads[0].headers["x-a"] == "b"


def test_body_of_a_length_ends_there() -> None:
    """Content-Length frames."""
    collected, _, finished = _parse(b"HTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\na", b"bc")
    assert (collected.heads[0].status, collected.body, finished) == (404, b"abc", True)


@pytest.mark.parametrize("head", [b"204 No Content", b"304 Not Modified"])
def test_statuses_without_a_body_are_finished_at_once(head: bytes) -> None:
    """No framing header is needed."""
    assert _parse(b"HTTP/1.1 " + head + b"\r\n\r\n")[2]


def test_empty_body_is_finished_at_once() -> None:
    """Content-Length: 0."""
    assert _parse(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")[2]


def test_unframed_body_ends_with_the_connection() -> None:
    """Neither length nor chunks: the close is the end, and the connection is spent."""
    collected, parser, finished = _parse(b"HTTP/1.0 200 OK\r\n\r\nab", b"c")
    assert (collected.body, finished, parser.keep_alive) == (b"abc", False, False)
    assert parser.end_of_connection()


def test_close_inside_a_framed_body_is_no_end() -> None:
    """A missing chunk is a broken answer."""
    _, parser, _ = _parse(CHUNKED[:-10])
    assert not parser.end_of_connection()


def test_interim_answer_is_skipped() -> None:
    """100 Continue is not the answer."""
    collected, _, finished = _parse(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED)
    assert ([head.status for head in collected.heads], finished) == ([200], True)


def test_connection_close_is_no_keep_alive() -> None:
    """The server says so."""
    head = b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n"
    assert not _parse(head)[1].keep_alive


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "bad content-length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nx", "bytes after the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "bad chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "bad chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, "line of more"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * HEAD_BYTES_MAX, "line of more than"),
    ],
)
def test_what_is_no_http_is_refused(data: bytes, reason: str) -> None:
    """With a reason, and with bounded memory."""
    with pytest.raises(FramingError, match=reason):
        _parse(data)
