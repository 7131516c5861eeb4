"""What goes through unchanged, what does not, and what is read on the way."""

from typing import Any

import pytest
from builders import make_instance

from router.errors import UpstreamFailed
from router.instances.upstream import _HOP_BY_HOP, _NOT_FORWARDED, Answer, _end_to_end, _url


def answer(*chunks: bytes, headers: list[tuple[str, str]] | None = None) -> Answer:
    """An answer that has passed these chunks on."""
    content: Any = None
    made = Answer(
        instance=make_instance(),
        status=200,
        headers=headers or [],
        first=b"",
        sent_s=0.0,
        first_byte_s=0.0,
        content=content,
    )
    made.tail.extend(chunks)
    return made


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":48}}}\n\n'], 48),
        ([b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}'], 0),
        ([b'"cached_to', b'kens":', b"1", b"23}"], 123),
        ([b'"cached_tokens":5}', b'"cached_tokens":7}'], 7),
        ([b'"cached_tokens":null'], None),
        ([b'"cached_tokens":'], None),
        ([b'{"text": "\\"cached_tokens\\":9"}'], None),
        ([b"data: [DONE]\n\n"], None),
        ([], None),
    ],
)
def test_cached_tokens_are_read_from_the_tail(chunks: list[bytes], expected: int | None) -> None:
    """However the chunks were cut; never from generated text."""
    assert answer(*chunks).cached_tokens() == expected


def test_only_the_tail_is_kept() -> None:
    """A long stream costs no memory, and usage in its middle is not usage at its end."""
    made = answer(b'"cached_tokens":1', *[b"x"] * 4)
    assert (made.cached_tokens(), len(made.tail)) == (None, 4)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("Content-Type", "text/event-stream; charset=utf-8")], True),
        ([("content-type", "application/json")], False),
        ([], False),
    ],
)
def test_a_stream_is_known_by_its_content_type(
    headers: list[tuple[str, str]], expected: bool
) -> None:
    """The request may have asked for a stream and got an error."""
    assert answer(headers=headers).event_stream is expected


def test_headers_of_the_connection_stay_here() -> None:
    """Hop-by-hop headers, those that Connection names, and our own are not forwarded."""
    headers = [
        ("Host", "router"),
        ("Content-Length", "5"),
        ("Transfer-Encoding", "chunked"),
        ("Expect", "100-continue"),
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("x-timestable-policy", "lmetric"),
        ("X-Request-Id", "r"),
        ("Authorization", "Bearer k"),
        ("X-Twice", "1"),
        ("X-Twice", "2"),
    ]
    kept = _end_to_end(headers, _NOT_FORWARDED)
    assert kept == [("Authorization", "Bearer k"), ("X-Twice", "1"), ("X-Twice", "2")]


def test_an_answers_length_and_id_are_kept() -> None:
    """Only hop-by-hop headers are taken out of an answer."""
    headers = [("Content-Length", "5"), ("Connection", "keep-alive"), ("Server", "uvicorn")]
    assert _end_to_end(headers, _HOP_BY_HOP) == [("Content-Length", "5"), ("Server", "uvicorn")]


def test_a_base_url_may_end_in_a_slash() -> None:
    """And may have a path of its own."""
    assert str(_url("http://h:1/", "/v1/completions")) == "http://h:1/v1/completions"
    assert str(_url("http://h:1/p", "/v1/completions")) == "http://h:1/p/v1/completions"


@pytest.mark.parametrize(
    ("before_first_byte", "timeout", "expected"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_what_may_be_asked_of_another_instance(
    before_first_byte: bool, timeout: bool, expected: bool
) -> None:
    """Nothing has reached the client, and there is time left."""
    instance_id = make_instance().instance_id
    error = UpstreamFailed(instance_id, "", before_first_byte=before_first_byte, timeout=timeout)
    assert error.retryable is expected
