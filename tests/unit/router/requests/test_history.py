"""What a request tells of its session: how many answers came before, and how much they are."""

import json
from typing import Any

import pytest

from router.requests.api_call import ApiCall
from router.requests.chat_messages import history_share
from router.requests.endpoints import ENDPOINTS, parse


def call(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> ApiCall:
    """Parse a request for model m."""
    raw = json.dumps(body | {"model": "m", "max_tokens": 1}).encode()
    return parse(ENDPOINTS[path], raw, headers or {}, request_id="r", path=path)


def said(role: str, length: int) -> dict[str, Any]:
    """A message of so many characters."""
    return {"role": role, "content": "x" * length}


TALK = [said("user", 50), said("assistant", 10), said("user", 15), said("assistant", 5)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [*TALK, said("user", 20)]}),
        ("/v1/responses", {"input": [*TALK, said("user", 20)]}),
        ("/v1/responses", {"instructions": "x" * 50, "input": [*TALK[1:], said("user", 20)]}),
        ("/v1/messages", {"messages": [*TALK, said("user", 20)]}),
        ("/v1/messages", {"system": "x" * 50, "messages": [*TALK[1:], said("user", 20)]}),
    ],
)
def test_a_conversation_tells_its_turn_and_its_history(path: str, body: dict[str, Any]) -> None:
    """Two answers before, and 80 of 100 characters up to the end of the second."""
    parsed = call(path, body)
    assert (parsed.turn, parsed.history_share) == (2, 0.8)


@pytest.mark.parametrize(
    ("message", "length"),
    [
        (said("assistant", 8), 8),
        ({"role": "assistant", "content": None}, 0),
        ({"role": "assistant", "content": [{"type": "text", "text": "x" * 7}, {"type": "a"}]}, 7),
        (
            said("assistant", 2)
            | {"tool_calls": [{"function": {"name": "f", "arguments": "{...}"}}, {"type": "f"}]},
            7,
        ),
    ],
)
def test_text_parts_and_arguments_count(message: dict[str, Any], length: int) -> None:
    """Of an answer what it says and what it calls tools with; pictures count nothing."""
    talk = [said("user", 8), message, said("user", 8)]
    assert history_share(talk) == (8 + length) / (16 + length)


def test_what_has_no_answer_or_no_text_has_no_known_history() -> None:
    """Then a policy has a rule of its own, where there is a turn at all."""
    assert history_share([said("system", 9), said("user", 9)]) is None
    assert history_share([said("assistant", 0), said("user", 0)]) is None


@pytest.mark.parametrize(
    ("told", "turn"), [("3", 3), ("0", 0), ("-1", 0), ("x", 0), ("1" * 7, 0), ("", 0)]
)
def test_a_plain_completion_has_the_turn_that_its_client_says(told: str, turn: int) -> None:
    """A hint: whatever is no number says nothing; a chat's own messages are better than it."""
    headers = {"x-timestable-turn": told}
    plain = call("/v1/completions", {"prompt": "hi"}, headers)
    assert (plain.turn, plain.history_share) == (turn, None)
    chat = call("/v1/chat/completions", {"messages": [*TALK, said("user", 20)]}, headers)
    assert chat.turn == 2
