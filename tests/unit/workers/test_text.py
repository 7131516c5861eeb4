"""Tokenizer, chat template and answer words of the simulated model."""

import asyncio
import json
from pathlib import Path

import pytest

from workers.simulated import make_tokenizer
from workers.simulated.text import SHIPPED_TOKENIZER, TextError, TextModel, TextModelError

TEXT = TextModel(SHIPPED_TOKENIZER)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return asyncio.run(TEXT.encode(text, add_special_tokens=True))


def test_shipped_files_are_small() -> None:
    """The tokenizer stays below 250 KB and within the stated vocabulary."""
    size_bytes = sum(path.stat().st_size for path in SHIPPED_TOKENIZER.iterdir())
    assert size_bytes < 250_000
    assert TEXT.vocabulary_size == make_tokenizer.VOCABULARY_SIZE


def test_shipped_template_is_the_one_of_the_script() -> None:
    """Nobody edited the product instead of its source."""
    config = json.loads((SHIPPED_TOKENIZER / "tokenizer_config.json").read_text())
    assert config["chat_template"] == make_tokenizer.CHAT_TEMPLATE


@pytest.mark.parametrize("text", ["plain words", "naïve 你好 🙂\n\t\x00", " leading", "<x> & 'y'"])
def test_every_string_survives_encoding(text: str) -> None:
    """Byte-level tokens lose nothing."""
    assert TEXT.decode(encode(text)) == text


def test_answer_text_encodes_to_the_answer_ids() -> None:
    """The next turn of a chat has the token ids that the answer's blocks were filled with."""
    positions = range(200)
    text = "".join(TEXT.output_text(7, position) for position in positions)
    assert encode(text) == [TEXT.output_id(7, position) for position in positions]


def test_answer_pieces_need_no_escaping_in_json() -> None:
    """The prebuilt bytes of a word are the inside of its JSON string."""
    for position in range(200):
        text = TEXT.output_text(3, position)
        assert json.loads(b'"' + TEXT.output_json(3, position) + b'"') == text


def test_long_text_is_encoded_the_same_off_the_loop() -> None:
    """A text above the limit takes another thread and gives the same ids."""
    short = "one two three " * 10
    assert encode(short * 100)[: len(encode(short)) - 1] == encode(short)[:-1]


def test_chat_is_rendered_as_the_template_says() -> None:
    """ChatML-like turns, ending in the assistant's header."""
    rendered = TEXT.render_chat(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
        tools=None,
        add_generation_prompt=True,
        template_arguments={},
    )
    assert rendered == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_go_into_the_system_turn() -> None:
    """The tools' JSON follows the system prompt, unescaped."""
    rendered = TEXT.render_chat(
        [{"role": "system", "content": "Be kind."}],
        tools=[{"name": "<f>"}],
        add_generation_prompt=False,
        template_arguments={},
    )
    assert 'Be kind.\n\nTools, one JSON object a line:\n{"name": "<f>"}<|im_end|>' in rendered


def test_template_argument_that_collides_is_refused() -> None:
    """Bad template arguments are an error of the request, not a crash."""
    with pytest.raises(TextError, match="messages"):
        TEXT.render_chat(
            [], tools=None, add_generation_prompt=True, template_arguments={"messages": []}
        )


def test_lone_surrogates_are_refused() -> None:
    """Text that is not Unicode cannot become tokens."""
    with pytest.raises(TextError, match="not valid Unicode"):
        encode("a\ud800b")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """The message says which file is missing."""
    with pytest.raises(TextModelError, match=r"tokenizer[.]json does not exist"):
        TextModel(tmp_path)


def test_malformed_tokenizer_is_named(tmp_path: Path) -> None:
    """A file that is not a tokenizer is a start-up error with its path."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextModelError, match=r"tokenizer[.]json"):
        TextModel(tmp_path)
