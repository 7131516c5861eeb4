"""HTTP/1.1 of engines: the payload is the same however it is cut; what is none is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.instances.http_wire import (
    HEAD_BYTES_MAX,
    AnswerHead,
    BadAnswer,
    ChunkedDecoder,
    Origin,
    chunk,
    parse_head,
    request_head,
)

PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


@given(PAYLOADS, st.sampled_from([b"", b"X-Trailer: 1\r\n"]), st.lists(st.integers(0, 400)))
def test_a_chunked_body_is_the_same_however_it_is_cut(
    payloads: list[bytes], trailers: bytes, cuts: list[int]
) -> None:
    """Chunks, line breaks and trailers may be cut anywhere; the end is seen at the end alone."""
    wire = b"".join(map(chunk, payloads)) + b"0\r\n" + trailers + b"\r\n"
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    decoder, got = ChunkedDecoder(), b""
    for start, end in itertools.pairwise(edges):
        assert not decoder.ended
        got += decoder.feed(wire[start:end])
    assert (got, decoder.ended, decoder.surplus) == (b"".join(payloads), True, False)
    assert decoder.feed(b"x") == b""
    assert decoder.surplus


@pytest.mark.parametrize(
    "data",
    [
        *(b"zz\r\n", b"+5\r\nhello\r\n", b"-1\r\n", b"1_0\r\n", b"\r\n", b"5 5\r\n"),
        *(b"0x5\r\nhello\r\n", b"0X5\r\n", b";a\r\n"),
        *(b"2\r\nabc\r\n", b"fffffffff\r\n", b"x" * 5000, b"0\r\n" + b"a: b\r\n" * 1000),
    ],
)
def test_what_is_not_chunked_is_refused(data: bytes) -> None:
    """Sizes are digits, lines are short, and a chunk ends where it was told to."""
    with pytest.raises(BadAnswer):
        ChunkedDecoder().feed(data)


def head(*lines: str, to_head: bool = False) -> AnswerHead | None:
    """A parsed head."""
    return parse_head("\r\n".join(lines).encode(), to_head=to_head)


@pytest.mark.parametrize(
    ("lines", "to_head", "expected"),
    [
        (("HTTP/1.1 200 OK", "Transfer-Encoding: Chunked"), False, (200, True, None, True)),
        (("HTTP/1.1 200 OK", "content-length: 5"), False, (200, False, 5, True)),
        (
            ("HTTP/1.1 200 OK", "content-length: 5", "Connection: close"),
            False,
            (200, False, 5, False),
        ),
        (
            ("HTTP/1.1 200 OK", "content-length: 5", "Connection: Close", "Connection: x"),
            False,
            (200, False, 5, False),
        ),
        (("HTTP/1.1 200", "content-length:5"), True, (200, False, 0, True)),
        (("HTTP/1.1 204 No Content",), False, (204, False, 0, True)),
        (("HTTP/1.1 200 OK",), False, (200, False, None, True)),
        (("HTTP/1.0 200 OK", "content-length: 5"), False, (200, False, 5, False)),
        (("HTTP/1.0 200 OK", "Connection: Keep-Alive"), False, (200, False, None, True)),
    ],
)
def test_how_a_body_is_framed(
    lines: tuple[str, ...], to_head: bool, expected: tuple[int, bool, int | None, bool]
) -> None:
    """By chunks, by a length, by the end of the connection, or not at all."""
    got = head(*lines, to_head=to_head)
    assert got is not None
    assert (got.status, got.chunked, got.length_bytes, got.keeps_alive) == expected


def test_an_interim_answer_is_none_yet() -> None:
    """The answer comes behind it."""
    assert head("HTTP/1.1 103 Early Hints", "Link: x") is None


@pytest.mark.parametrize(
    "lines",
    [
        ("220 smtp ready",),
        ("HTTP/2 200 OK",),
        ("HTTP/1.1 200 OK", "no colon"),
        ("HTTP/1.1 200 OK", "Name : value"),
        ("HTTP/1.1 200 OK", "A: b", " folded"),
        ("HTTP/1.1 200 OK", "A: b\nX-Smuggled: 1"),
        ("HTTP/1.1 200 OK", "A: b\x01c"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 6"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "Transfer-Encoding: chunked"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "content-length: 5"),
        ("HTTP/1.1 200 OK", "Content-Length: +5"),
        ("HTTP/1.1 200 OK", "Content-Length: \uff15"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "Transfer-Encoding:"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding:", "Content-Length: 5"),
        ("HTTP/1.1 101 Switching Protocols", "Upgrade: websocket"),
    ],
)
def test_what_is_no_head_is_refused(lines: tuple[str, ...]) -> None:
    """Two readers of such a head could take different bodies out of it."""
    with pytest.raises(BadAnswer):
        head(*lines)


def test_headers_keep_their_bytes() -> None:
    """Order, case, repetition and bytes that are no UTF-8."""
    got = parse_head(b"HTTP/1.1 200 OK\r\nX-B: \xff\r\nx-a:  two \r\nX-B: 3", to_head=False)
    assert got is not None
    raw = [("X-B", "\udcff"), ("x-a", "two"), ("X-B", "3")]
    assert got.headers == raw
    wire = request_head("POST", "/v1?a=%20b", "h:1", raw, 2)
    assert wire == (
        b"POST /v1?a=%20b HTTP/1.1\r\nHost: h:1\r\nX-B: \xff\r\nx-a: two\r\nX-B: 3\r\n"
        b"Content-Length: 2\r\n\r\n"
    )


@pytest.mark.parametrize("value", ["a\r\nX: 1", "a\nX: 1", "a\r"])
def test_no_header_ends_early(value: str) -> None:
    """A line break in a value would begin a header of somebody else's."""
    with pytest.raises(ValueError, match="line break"):
        request_head("GET", "/", "h", [("A", value)], None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1/", ("h", 1, False, "h:1", "")),
        ("http://h:1/p/", ("h", 1, False, "h:1", "/p")),
        ("https://h", ("h", 443, True, "h", "")),
        ("http://[::1]:8000", ("::1", 8000, False, "[::1]:8000", "")),
    ],
)
def test_where_an_instance_listens(url: str, expected: tuple[str, int, bool, str, str]) -> None:
    """A base URL may end in a slash and have a path of its own."""
    origin = Origin.of(url)
    assert (origin.host, origin.port, origin.tls, origin.authority, origin.prefix) == expected


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:port"])
def test_where_nobody_can_listen(url: str) -> None:
    """Said, not guessed."""
    with pytest.raises(ValueError, match=r"is not like|port"):
        Origin.of(url)


def test_heads_are_bounded_well_above_real_ones() -> None:
    """An engine's own headers and a trace id fit many times."""
    assert HEAD_BYTES_MAX >= 8 * 8 * 1024
