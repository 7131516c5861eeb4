"""Bodies of requests."""

import json

import pytest

from loadgen.client import StreamingClient, Target
from loadgen.errors import EndpointError
from loadgen.http_client import Origin
from loadgen.trace import TraceRow


def _target(**changes: object) -> Target:
    return Target(**{"url": "http://127.0.0.1:1", "model": "m", **changes})


def test_block_row_becomes_a_completion_with_token_ids() -> None:
    """Exactly the trace's answer length is asked for, streamed, with usage at the end."""
    row = TraceRow(arrival_s=0, prompt_tokens=5, output_tokens=7, block_ids=(1,), session_id="s")
    call = StreamingClient(_target()).prepare(row, row_index=3, scheduled_s=1.0)
    body = json.loads(call.body)
    prompt = body.pop("prompt")
    assert body == {
        "model": "m",
        "max_tokens": 7,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (len(prompt), call.path, call.headers["x-session-id"]) == (5, "/v1/completions", "s")


def test_text_row_becomes_a_chat() -> None:
    """One user message."""
    row = TraceRow(arrival_s=0, prompt_tokens=5, output_tokens=7, text='say "é"')
    call = StreamingClient(_target()).prepare(row, row_index=0, scheduled_s=0.0)
    assert call.path == "/v1/chat/completions"
    assert json.loads(call.body)["messages"] == [{"role": "user", "content": 'say "é"'}]


def test_given_token_ids_are_sent_as_they_are() -> None:
    """No generated tokens where the trace has its own."""
    row = TraceRow(arrival_s=0, prompt_tokens=2, output_tokens=1, token_ids=(7, 8))
    call = StreamingClient(_target()).prepare(row, row_index=0, scheduled_s=0.0)
    assert json.loads(call.body)["prompt"] == [7, 8]


def test_own_headers_and_key_are_added() -> None:
    """An extra header outranks ours."""
    row = TraceRow(arrival_s=0, prompt_tokens=2, output_tokens=1, token_ids=(7, 8))
    target = _target(api_key="k", headers={"x-timestable-explain": "1", "accept": "x"})
    call = StreamingClient(target).prepare(row, row_index=0, scheduled_s=0.0)
    assert tuple(
        call.headers[name] for name in ("authorization", "x-timestable-explain", "accept")
    ) == ("Bearer k", "1", "x")


@pytest.mark.parametrize("header", [("a b", "c"), ("a", "b\r\nevil: 1"), ("", "x"), ("a:", "b")])
def test_header_that_would_break_the_request_is_refused(header: tuple[str, str]) -> None:
    """No request can be smuggled in through an option."""
    with pytest.raises(EndpointError, match="bad request header"):
        _target(headers=dict([header]))


@pytest.mark.parametrize("url", ["foo", "ftp://x", "http://", "http://h:port", "http://h:99999"])
def test_url_that_is_none_is_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(EndpointError, match="not a URL"):
        Origin.parse(url)


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://h", "h:80", ""),
        ("https://h/v1/", "h:443", ""),
        ("http://[::1]:8000/api/v1", "[::1]:8000", "/api"),
    ],
)
def test_url_is_taken_with_or_without_v1(url: str, authority: str, prefix: str) -> None:
    """Both ways of writing a base URL mean the same."""
    origin = Origin.parse(url)
    assert (authority, prefix) == (origin.authority, origin.path_prefix)
