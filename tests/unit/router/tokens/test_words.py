"""Words that were met before need no tokenizer, and have its ids all the same."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, TEXT, gpt2

from router.tokens import words as module
from router.tokens.cuts import Cutter
from router.tokens.encoder import _encode
from router.tokens.words import Words

OF_WORDS = ("gpt2", "llama3", "qwen")
PIECES = [
    *["a", "Z", "word", " word", "'s", "'LL", "''", "don't", "1", "1234567", "?!", " ?!\r\n", "<|"],
    *[" ", "  ", "\t", "\n", "\r\n", " \n ", "\n\n  ", "\x0b", "\x0c", "\x1c", "\x00", "_", "\x7f"],
]


class Counted:
    """A tokenizer's own way, and what was left to it."""

    def __init__(self, backend: Any) -> None:
        self._encode = partial(_encode, backend, add_special_tokens=False)
        self.texts: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        self.texts += texts
        return self._encode(texts)


def made_of_words(backend: Any) -> tuple[Words | None, Counted]:
    """Words of a tokenizer, which has not been asked for anything yet."""
    own = Counted(backend)
    cutter = Cutter.of(backend.get_added_tokens_decoder().values())
    assert cutter is not None
    words = Words.of(backend, cutter, own)
    if words is not None:
        words._known.clear()
    own.texts.clear()
    return words, own


@cache
def kind(name: str) -> tuple[Words, Counted]:
    """Words of a kind that has them."""
    words, own = made_of_words(KINDS[name]())
    assert words is not None
    return words, own


@pytest.mark.parametrize("name", OF_WORDS)
@given(
    text=st.lists(
        st.one_of(
            st.sampled_from(PIECES), st.sampled_from(TEXT), st.text(st.characters(codec="ascii"))
        ),
        max_size=12,
    ).map("".join),
    window=st.integers(1, 40),
)
def test_words_have_the_ids_of_the_text(name: str, text: str, window: int) -> None:
    """In windows of any size, met first and again."""
    words, own = kind(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_CHARACTERS", window)
        for _ in range(2):
            assert words.encode([text]) == own([text])


@pytest.mark.parametrize("name", OF_WORDS)
def test_a_word_that_was_met_is_not_tokenized_again(name: str) -> None:
    """In another text, behind the token that begins it."""
    words, own = made_of_words(KINDS[name]())
    assert words is not None
    head = min(words._heads)
    words.encode([f"{head}user\none two three"])
    assert own.texts == ["user", "\n", "one", " two", " three"]
    own.texts.clear()
    words.encode([f"{head}user\none three two"])
    assert own.texts == []


def test_what_is_not_made_of_words_is_left_to_the_tokenizer() -> None:
    """Other letters, added tokens in the middle, and tokens that take spaces behind them."""
    backend = gpt2()
    words, own = made_of_words(backend)
    assert words is not None
    texts = ["na\u00efve", "one <|im_end|> two", "<|im_end|>two <|endoftext|>", "x" * 40_000]
    words.encode(texts)
    assert own.texts == texts
    assert all(made_of_words(KINDS[name]())[0] is None for name in ("prefixed_space", "stripping"))


def test_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than may be remembered, and all are forgotten; long ones never are."""
    monkeypatch.setattr(module, "WORDS_MAX", 3)
    words, own = made_of_words(gpt2())
    assert words is not None
    words.encode(["a b c"])
    assert len(words._known) == 3
    assert words.encode(["d e" + "f" * module.WORD_CHARACTERS_MAX]) == own(["d e" + "f" * 32])
    assert set(words._known) == {"d"}
