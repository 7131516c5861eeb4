"""What goes through unchanged, what does not, and what is read on the way."""

from typing import Any

import pytest
from builders import make_instance

from router.errors import UpstreamCause, UpstreamFailed
from router.instances.answer import Answer
from router.instances.sending import _NOT_FORWARDED, HOP_BY_HOP, end_to_end


def answer(*chunks: bytes, headers: list[tuple[str, str]] | None = None) -> Answer:
    """An answer that has passed these chunks on."""
    connection: Any = None
    made = Answer(
        instance=make_instance(),
        status=200,
        headers=headers or [],
        first=b"",
        sent_s=0.0,
        first_byte_s=0.0,
        connection=connection,
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
        ([b'{"usage":{"input_tokens":3,"cache_read_input_tokens":32}}'], 32),
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
    kept = end_to_end(headers, _NOT_FORWARDED)
    assert kept == [("Authorization", "Bearer k"), ("X-Twice", "1"), ("X-Twice", "2")]


def test_an_answers_length_and_id_are_kept() -> None:
    """Only hop-by-hop headers are taken out of an answer."""
    headers = [("Content-Length", "5"), ("Connection", "keep-alive"), ("Server", "uvicorn")]
    assert end_to_end(headers, HOP_BY_HOP) == [("Content-Length", "5"), ("Server", "uvicorn")]


@pytest.mark.parametrize(
    ("before_first_byte", "cause", "expected"),
    [
        (True, UpstreamCause.CONNECT, True),
        (True, UpstreamCause.CONNECT_TIMEOUT, True),
        (True, UpstreamCause.FIRST_BYTE_TIMEOUT, False),
        (False, UpstreamCause.RESET, False),
    ],
)
def test_what_may_be_asked_of_another_instance(
    before_first_byte: bool, cause: UpstreamCause, expected: bool
) -> None:
    """Nothing has reached the client, and there is time left."""
    instance_id = make_instance().instance_id
    error = UpstreamFailed(instance_id, "", before_first_byte=before_first_byte, cause=cause)
    assert error.retryable is expected
