"""The event scanner: what a stream told, however its bytes were cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.sse import (
    EVENT_BYTES_MAX,
    EventScanner,
    MalformedStreamError,
    StreamEnd,
    error_message,
)


def _token(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def _chat(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def _scan(*pieces: bytes) -> StreamEnd:
    """Piece number n arrives at n seconds, from 1."""
    scanner = EventScanner()
    for moment, piece in enumerate(pieces, 1):
        scanner.feed(piece, float(moment))
    return scanner.close()


def test_each_event_is_a_token_but_usage_and_done() -> None:
    """Token times, usage and no error."""
    end = _scan(_token("a"), _token(" data: b"), _token("c"), USAGE, DONE)
    assert end.token_times_s == (1.0, 2.0, 3.0)
    assert (
        end.first_token_s,
        end.prompt_tokens,
        end.output_tokens,
        end.cached_tokens,
        end.error,
    ) == (1.0, 9, 3, 4, None)


def test_usage_and_done_in_the_last_token_s_piece_are_told_apart() -> None:
    """A fast server packs all of it into one read."""
    end = _scan(_token("a"), _token("b") + USAGE + DONE)
    assert (end.token_times_s, end.output_tokens) == ((1.0, 2.0), 3)


def test_first_token_is_the_first_with_text() -> None:
    """The role chunk of a chat answer is no token; empty text later on is one."""
    end = _scan(_chat(role="assistant", content=""), _chat(content="a"), _chat(content=""), DONE)
    assert (end.first_token_s, end.token_times_s) == (2.0, (2.0, 3.0))


def test_reasoning_counts_as_a_token() -> None:
    """What a reasoning model thinks first is what a person sees first."""
    end = _scan(_chat(role="assistant"), _chat(reasoning_content="hm"), _chat(content="a"), DONE)
    assert end.first_token_s == 2.0


def test_usage_inside_the_last_token_event_is_read() -> None:
    """Some servers send no event of its own for usage."""
    last = b'data: {"choices":[{"text":"b"}],"usage":{"completion_tokens":2}}\n\n'
    end = _scan(_token("a"), last, DONE)
    assert (end.token_times_s, end.output_tokens) == ((1.0, 2.0), 2)


def test_comments_and_other_fields_are_no_events() -> None:
    """Pings keep the connection alive and count for nothing, also right before the end."""
    end = _scan(b": ping\n\n", b"event: x\n" + _token("a"), USAGE, b": ping\n\n", b": p\n\n", DONE)
    assert (end.token_times_s, end.output_tokens, end.error) == ((2.0,), 3, None)


def test_carriage_returns_are_line_ends_too() -> None:
    """The standard allows them."""
    end = _scan(*(piece.replace(b"\n", b"\r\n") for piece in (_token("a"), USAGE, DONE)))
    assert (end.token_times_s, end.output_tokens, end.error) == ((1.0,), 3, None)


@pytest.mark.parametrize("ending", [(), (DONE,)])
def test_error_event_is_the_stream_s_error(ending: tuple[bytes, ...]) -> None:
    """With or without [DONE] after it; it is no token."""
    end = _scan(_token("a"), b'data: {"error":{"message":"no blocks left"}}\n\n', *ending)
    assert (end.error, end.token_times_s) == ("stream: no blocks left", (1.0,))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((), "ended without data"),
        ((_token("a"),), "ended without data"),
        ((_token("a"), b'data: {"choi'), "ended without data"),
        ((b'{"object":"text_completion"}',), "ended without data"),
        ((_token("a"), b"data: {oops\n\n", DONE), "event is not JSON"),
        ((_token("a"), b"data: 5\n\n", DONE), "event is not a JSON object"),
        ((DONE,), "no token"),
        ((USAGE, DONE), "no token"),
    ],
)
def test_incomplete_stream_is_malformed(pieces: tuple[bytes, ...], reason: str) -> None:
    """Never a success, never a crash."""
    error = _scan(*pieces).error
    assert error is not None
    assert error.startswith("malformed: ")
    assert reason in error


def test_garbage_before_the_first_token_ends_the_stream_at_once() -> None:
    """There is no point in waiting for the rest."""
    with pytest.raises(MalformedStreamError, match="not JSON"):
        EventScanner().feed(b"data: hello\n\n", 0.0)


def test_endless_line_is_refused() -> None:
    """Memory is bounded."""
    scanner = EventScanner()
    scanner.feed(b"x" * EVENT_BYTES_MAX, 0.0)
    with pytest.raises(MalformedStreamError, match="a line of more than"):
        scanner.feed(b"x", 0.0)


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_cuts_between_pieces_change_no_count(cuts: list[int]) -> None:
    """However a stream is cut into reads, its events and usage are the same."""
    stream = b": ping\n\n" + _token("a") + _token("b") + _token("c") + USAGE + DONE
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges) if a < b]
    end = _scan(*pieces)
    assert (
        len(end.token_times_s),
        end.output_tokens,
        end.cached_tokens,
        end.error,
    ) == (3, 3, 4, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"error":"m"}', "m"),
        (b'{"detail":"m"}', None),
        (b"<html>", None),
    ],
)
def test_message_of_an_error_body(body: bytes, message: str | None) -> None:
    """OpenAI-shaped errors give their message, anything else gives none."""
    assert message == error_message(body)
