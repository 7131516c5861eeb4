"""A text's parts have the whole text's token ids, with every kind of tokenizer."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, TEXT

from indexer.contract.block_hash import pack_tokens
from router.tokens.encoder import Encoder

PIECES = [
    *["", " ", "  ", "\n", "\n\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u200b", "\u2581", "\x1c"],
    *["a", "Z", "'s", "1234", "hello", " world", "Upper", "e\u0301", "\ufb01", "\u4f60\u597d"],
    *["\U0001f469\u200d\U0001f4bb", "_", "<", "|", ">", "<|", "|>", "[", "]", "</s", "\x00"],
]


@cache
def kind(name: str) -> tuple[Any, Encoder, list[str]]:
    """A tokenizer, the encoder that does it in parts, and its added tokens."""
    made = KINDS[name]()
    encoder = Encoder(made, cache_bytes_max=200_000)
    assert encoder.whole_reason is None
    contents = [token.content for token in made.get_added_tokens_decoder().values()]
    return made, encoder, contents[:40] + contents[-20:]


def texts(tokens: list[str]) -> st.SearchStrategy[str]:
    """Added tokens, whole and broken off, among texts and pieces of all sorts."""
    broken = st.sampled_from(tokens).flatmap(
        lambda token: st.integers(0, len(token)).map(lambda at: token[:at])
    )
    piece = st.one_of(
        st.sampled_from(tokens),
        st.sampled_from(tokens).map(str.upper),
        broken,
        st.sampled_from(PIECES),
        st.sampled_from(TEXT),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    )
    return st.lists(piece, max_size=14).map("".join)


@pytest.mark.parametrize("name", KINDS)
def test_a_token_between_any_two_pieces_is_found_alike(name: str) -> None:
    """Spaces, letters and broken tokens on either side of it, and other tokens."""
    tokenizer, encoder, tokens = kind(name)
    few = tokens[:: len(tokens) // 20 + 1]
    neighbours = [*PIECES, *few[:8], few[0][:-1], few[0][1:]]
    texts = [a + token + b for token in few for a in neighbours for b in neighbours[::3]]
    whole = [
        pack_tokens(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
    assert encoder.encode(texts, add_special_tokens=False) == whole


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_parts_have_the_ids_of_the_whole(name: str, data: st.DataObject) -> None:
    """First met and met again, with special tokens around the text and without."""
    tokenizer, encoder, tokens = kind(name)
    special = data.draw(st.booleans())
    for text in data.draw(st.lists(texts(tokens), min_size=1, max_size=3)):
        whole = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        for _ in range(2):
            assert encoder.encode([text], add_special_tokens=special) == [pack_tokens(whole)]


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_that_grows_has_the_ids_of_the_whole(name: str) -> None:
    """Turn by turn; what came before is not tokenized again."""
    tokenizer, encoder, _ = kind(name)
    cut_at = sorted(encoder._parts.cutter.tokens, key=len)  # type: ignore[union-attr]
    conversation = ""
    for turn in range(12):
        token = cut_at[turn % len(cut_at)]
        conversation += f"{token}{TEXT[turn % len(TEXT)]} {turn}\n" + PIECES[turn]
        whole = tokenizer.encode_batch_fast([conversation], add_special_tokens=True)[0].ids
        assert encoder.encode([conversation], add_special_tokens=True) == [pack_tokens(whole)]
