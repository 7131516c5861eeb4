"""Text in place of token ids: lengths, and chains whose beginnings are those of conversations."""

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from builders import make_fleet_record, make_instance
from hypothesis import given
from hypothesis import strategies as st

from indexer.contract.block_hash import pack_tokens
from router.eligibility import Roster
from router.index.known_fleets import ServedModel
from router.requests.api_call import (
    ApiCall,
    ChatPrompt,
    OpaquePrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from router.requests.chat_messages import chat_prompt
from router.tokens.approximate import MEDIA_TOKENS_ESTIMATE, chain, estimated

SERVED = ServedModel(
    name="m",
    fleet=make_fleet_record(),
    adapter=None,
    max_model_len_tokens=None,
    model_root="m",
    roster=Roster.of({0: make_instance()}),
)
BLOCK_BYTES = 64


def call(prompt: Prompt, **changes: Any) -> ApiCall:
    """A call with a body of 40 bytes."""
    values: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "body": b"x" * 40,
        "headers": (),
        "request_id": "r",
        "model": "m",
        "stream": False,
        "prompt": prompt,
    }
    return ApiCall(**values | changes)


def chained(prompt: Prompt, **changes: Any) -> bytes:
    """Hashes of a prompt's text."""
    one = call(prompt, **changes)
    return chain(estimated(SERVED, one).text, SERVED, one)


def picture(url: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


texts = st.text(max_size=200)
media = st.sampled_from(["a", "b"]).map(picture)
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}) | media, max_size=3),
)


@given(st.lists(messages, min_size=1, max_size=4), st.lists(messages, max_size=3))
def test_what_a_conversation_begins_with_its_chain_begins_with(
    turn: list[dict[str, Any]], later: list[dict[str, Any]]
) -> None:
    """Every chunk of a turn is one of the next turn; depth is length by the same estimate."""
    before, after = chat_prompt(turn), chat_prompt([*turn, *later])
    assert chained(after).startswith(chained(before))
    one = estimated(SERVED, call(before))
    assert len(chained(before)) // 8 == len(one.text) // BLOCK_BYTES
    assert one.prompt_tokens == max(1, len(one.text) // 4)


def test_a_picture_is_known_by_its_content_and_counts_as_many_tokens() -> None:
    """Equal ones share a prefix, others share what is before them, whatever their data's size."""
    question = {"type": "text", "text": "What is this? " * 10}

    def chat(url: str) -> Prompt:
        return chat_prompt([{"role": "user", "content": [question, picture(url)]}])

    one, same, other = chained(chat("cat" * 9000)), chained(chat("cat" * 9000)), chained(chat("x"))
    assert one == same
    shared = 140 // BLOCK_BYTES
    assert one[: 8 * shared] == other[: 8 * shared]
    assert one[8 * (shared + 1) :] != other[8 * (shared + 1) :]
    assert len(one) // 8 >= MEDIA_TOKENS_ESTIMATE // 16
    tokens = estimated(SERVED, call(chat("cat" * 9000))).prompt_tokens
    assert tokens == MEDIA_TOKENS_ESTIMATE + 147 // 4


def test_tools_come_before_the_conversation() -> None:
    """As templates show them: another tool is another prefix, however long the messages are."""
    said = [{"role": "user", "content": "Hello. " * 40}]
    tool = {"type": "function", "function": {"name": "f"}}
    with_tool = chained(ChatPrompt(messages=said, tools=[tool]))
    assert with_tool[:8] != chained(ChatPrompt(messages=said))[:8]


@pytest.mark.parametrize(
    ("prompt", "changes", "tokens", "text_bytes"),
    [
        (OpaquePrompt(pieces=()), {}, 10, 0),  # by the body, where nothing else is known
        (OpaquePrompt(pieces=("a" * 79,)), {}, 20, 80),
        (TextPrompt(texts=("a" * 80, "b" * 40)), {}, 30, 80),
        (TextPrompt(texts=("",)), {"body": b""}, 1, 0),
        (TextPrompt(texts=("a" * 80,)), {"truncate_prompt_tokens": 5}, 5, 0),
        (TextPrompt(texts=("a" * 80,)), {"truncate_prompt_tokens": 50}, 20, 80),
        (TokenPrompt(packed=(pack_tokens([1, 2]),)), {}, 2, 8),
    ],
)
def test_lengths_are_estimates(
    prompt: Prompt, changes: dict[str, Any], tokens: int, text_bytes: int
) -> None:
    """Four bytes a token; a text whose beginning is cut off has no prefix."""
    one = estimated(SERVED, call(prompt, **changes))
    assert (one.prompt_tokens, len(one.text), one.packed) == (tokens, text_bytes, b"")


def test_no_more_is_expected_or_looked_up_than_the_model_takes() -> None:
    """The engine refuses what is longer."""
    small = replace(SERVED, max_model_len_tokens=10)
    one = estimated(small, call(TextPrompt(texts=("a" * 800,))))
    assert (one.prompt_tokens, len(one.text)) == (10, 40)


def test_media_beyond_what_the_model_takes_cost_no_memory() -> None:
    """A request may name a hundred thousand of them, each a hundred times as long by estimate."""
    small = replace(SERVED, max_model_len_tokens=2000)
    many = OpaquePrompt(pieces=("image_url:" + "0" * 32,) * 5000, media_count=5000)
    tracemalloc.start()
    one = estimated(small, call(many))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (one.prompt_tokens, len(one.text)) == (2000, 8000)
    assert peak_bytes < 200_000
    cut = estimated(SERVED, call(many, truncate_prompt_tokens=2000))
    assert (cut.prompt_tokens, cut.text) == (2000, b"")


def test_salt_adapter_and_log_probabilities_separate() -> None:
    """As for token ids: another salt is another cache, and whoever reads nothing hits nothing."""
    prompt = TextPrompt(texts=("a" * 80,))
    assert chained(prompt) != chained(prompt, cache_salt="s")
    assert chained(prompt, reads_prefixes=False) == b""
