"""Token ids of plain text, word by word: most words of a text were met before.

A byte-level tokenizer cuts what lies between added tokens into words, by a regular expression, and
makes ids of each word alone. So a text's ids are its words' ids in a row, and a word that was met
before need not be tokenized again: an eighth of the time. Where the words end is found here by the
same expression as Python has it; the two read it alike in ASCII, so any other text is left to the
tokenizer, as are texts with added tokens in the middle. Each tokenizer is tried when it is loaded.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self

from router.tokens.cuts import Cutter, longest_of

WORDS_MAX: Final = 1 << 15
"""Remembered, some 8 MiB; one more, and all are forgotten."""

WORD_CHARACTERS_MAX: Final = 32
"""Of a word that is remembered."""

WINDOW_CHARACTERS: Final = 16 * 1024
"""Cut into words in one go, in about half a millisecond in which no other thread goes on."""

_NEWLINES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by, where it is not told otherwise."""

KNOWN_WORDS: Final = frozenset(
    {
        GPT2_WORDS,
        rf"{_SHORT_FORMS}|\p{{N}}{{1,3}}|{_NEWLINES}",  # GPT-4, Llama 3
        rf"{_SHORT_FORMS}|\p{{N}}|{_NEWLINES}",  # Qwen
    }
)
"""Of these is known: each word alone is one word, and none goes on behind a letter and a space."""

_BETWEEN_WORDS: Final = re.compile("[A-Za-z](?= [A-Za-z])")

Encode = Callable[[Sequence[str]], list[bytes]]
"""The tokenizer itself: packed ids of each text, without special tokens around it."""


class AddedToken(Protocol):
    """What `tokenizers.AddedToken` tells of a token."""

    content: str
    rstrip: bool


class Words:
    """One tokenizer's words. Safe in several threads.

    Args:
        pattern: finds words of ASCII text.
        cutter: where texts are cut into parts.
        added: finds any added token.
        heads: packed ids of tokens that a part may begin with.
        encode: for what is not known.
    """

    def __init__(
        self,
        *,
        pattern: re.Pattern[str],
        cutter: Cutter,
        added: Cutter,
        heads: Mapping[str, bytes],
        encode: Encode,
    ) -> None:
        self._find = pattern.findall
        self._cutter = cutter
        self._added = added
        self._heads = heads
        self._encode = encode
        self._known: dict[str, bytes] = {}

    @classmethod
    def of(cls, backend: Any, cutter: Cutter, encode: Encode) -> Self | None:
        """For a tokenizer that is made of words; None for any other.

        Args:
            backend: a `tokenizers.Tokenizer` without truncation and padding.
            cutter: of its texts.
            encode: its own way.
        """
        expression = _expression(backend)
        if expression is None:
            return None
        added: list[AddedToken] = list(backend.get_added_tokens_decoder().values())
        heads = [one.content for one in added if one.content in cutter.tokens and not one.rstrip]
        names = {one.content for one in added if one.content}
        names |= {unicodedata.normalize("NFC", name) for name in names}
        firsts = {name[0] for name in names}
        made = cls(
            pattern=_in_ascii(expression),
            cutter=cutter,
            added=Cutter(
                tokens=frozenset(names),
                pattern=longest_of(names),
                lead=firsts.pop() if len(firsts) == 1 else "",
            ),
            heads=dict(zip(heads, encode(heads), strict=True)),
            encode=encode,
        )
        texts = list(_battery())
        return made if made.encode(texts) == encode(texts) else None

    def encode(self, parts: Sequence[str]) -> list[bytes]:
        """Packed token ids of each part."""
        packed = [self._ids(part) for part in parts]
        left = [part for part, ids in zip(parts, packed, strict=True) if ids is None]
        others = iter(self._encode(left) if left else ())
        return [next(others) if ids is None else ids for ids in packed]

    def _ids(self, part: str) -> bytes | None:
        """Of a part that is made of words; None of any other."""
        if not part.isascii():
            return None
        text, ids = part, []
        head = self._cutter.pattern.match(part)
        if head is not None:
            known = self._heads.get(head[0])
            if known is None:
                return None
            text = part[head.end() :]
            ids.append(known)
        if self._added.finds(text):
            return None
        for window in _windows(text):
            if window is None:
                return None
            ids.append(self._of_words(self._find(window)))
        return b"".join(ids)

    def _of_words(self, words: Sequence[str]) -> bytes:
        known = self._known
        try:
            return b"".join(map(known.__getitem__, words))
        except KeyError:
            pass
        found = [known.get(word) for word in words]
        missing = list({word: None for word, ids in zip(words, found, strict=True) if ids is None})
        new = dict(zip(missing, self._encode(missing), strict=True))
        if len(known) + len(new) > WORDS_MAX:
            known.clear()
        known.update(item for item in new.items() if len(item[0]) <= WORD_CHARACTERS_MAX)
        return b"".join(
            new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)
        )


def _windows(text: str) -> Iterator[str | None]:
    """The text in pieces that end between two words; None where it cannot be cut so."""
    start = 0
    while len(text) - start > WINDOW_CHARACTERS:
        least = start + WINDOW_CHARACTERS
        between = _BETWEEN_WORDS.search(text, least, least + WINDOW_CHARACTERS)
        if between is None:
            yield None
            return
        yield text[start : between.end()]
        start = between.end()
    yield text[start:]


def _expression(backend: Any) -> str | None:
    """By which a tokenizer cuts texts into words, if it is known and all there is to it."""
    normalizer = backend.normalizer
    if normalizer is not None and type(normalizer).__name__ != "NFC":  # which leaves ASCII as it is
        return None
    if backend.pre_tokenizer is None:
        return None
    state = json.loads(backend.pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_WORDS
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(expression)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if expression in KNOWN_WORDS:
            return expression
        case _:
            return None


def _in_ascii(expression: str) -> re.Pattern[str]:
    """A known expression as Python has it."""
    out, in_brackets = [], False
    for piece in re.findall(r"\\p\{[LN]\}|\\.|.", expression):
        letters = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}.get(piece)
        if letters is not None:
            out.append(letters if in_brackets else f"[{letters}]")
            continue
        in_brackets = piece == "[" or (in_brackets and piece != "]")
        out.append(piece)
    return re.compile("".join(out), re.ASCII)


def _battery() -> Iterator[str]:
    """Texts in which every ASCII character meets all kinds of neighbours; the same each time."""
    for code in range(128):
        one = chr(code)
        yield f"a{one}b {one}c{one} {one}{one} 1{one}2 \n{one}\t{one}  {one}\r\n{one}.{one}'{one}"
    yield "I'll say it's 1234567, you've; they'D  done\n\n  so ('ok'). \t\n"
    yield f"{'one two ' * (WINDOW_CHARACTERS // 4)}three"
