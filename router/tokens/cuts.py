"""Where a text may be cut so that its parts' token ids, put together, are the whole text's.

A fast tokenizer first looks for its added tokens in the raw text, leftmost and longest first, and
works on what lies between them piece by piece: nothing before such a token changes what comes after
it. So a text may be cut in front of one, if the scan for them comes out alike in the parts:

- `normalized` tokens are looked for later, inside a piece; no cut there.
- `lstrip` takes spaces from the part before, `single_word` looks at its last character; no cut.
- The first character is ASCII punctuation, so no `single_word` or `rstrip` token before it sees
  whether the text goes on.

All these tokens must be looked for, since one may cover a part of another. Unless, as is usual, the
first characters of those to cut at (the leads) are nowhere else in such tokens: then no other match
can cover one, and it is enough to look for tokens that begin with a lead.

A part behind a cut begins with its token. So what treats the beginning of a text differently
(Metaspace's scheme "first") finds the text's own beginning in the first part, a token elsewhere.
"""

import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

_LEADS: Final = frozenset(string.punctuation) - {"_"}

LEADS_MAX: Final = 1024
"""Looked at one by one. A text with more, as HTML is, may have one at every other character, and
then it is faster to look for the tokens themselves."""

FOUND_MAX: Final = 1024
"""Tokens in a text that is cut at once, which takes a millisecond; a long chat has a hundred."""


class AddedToken(Protocol):
    """What `tokenizers.AddedToken` tells of a token."""

    content: str
    lstrip: bool
    single_word: bool
    normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Cuts texts in front of added tokens.

    Attributes:
        tokens: where cuts are made.
        pattern: finds these, and the tokens that take their place where they match.
        lead: the character that all of them begin with, found faster than they are; empty if they
            have not one.
    """

    tokens: frozenset[str]
    pattern: re.Pattern[str]
    lead: str

    @classmethod
    def of(cls, added: Iterable[AddedToken]) -> "Cutter | None":
        """For a tokenizer with these added tokens; None when there is nothing to cut at."""
        raw = [token for token in added if not token.normalized and token.content]
        inside = frozenset("".join(token.content[1:] for token in raw))
        for leads, looked_for in (
            (_LEADS - inside, [one for one in raw if one.content[0] in _LEADS - inside]),
            (_LEADS, raw),
        ):
            cuts = frozenset(one.content for one in looked_for if _is_cut(one, leads))
            if cuts:
                firsts = {one.content[0] for one in looked_for}
                return cls(
                    tokens=cuts,
                    pattern=longest_of(token.content for token in looked_for),
                    lead=firsts.pop() if len(firsts) == 1 else "",
                )
        return None

    def cut(self, text: str) -> list[str]:
        """Parts that make up the text; one part when there is nothing to cut at."""
        return self._parts(text, self._matches(text))

    def cut_few(self, text: str) -> list[str] | None:
        """As `cut`; None where more than FOUND_MAX tokens are found, which takes its time."""
        matches = list(itertools.islice(self._matches(text), FOUND_MAX + 1))
        return None if len(matches) > FOUND_MAX else self._parts(text, matches)

    def finds(self, text: str) -> bool:
        """Whether the pattern is anywhere in the text."""
        return next(self._matches(text), None) is not None

    def _parts(self, text: str, matches: Iterable[re.Match[str]]) -> list[str]:
        tokens = self.tokens
        at = [match.start() for match in matches if match[0] in tokens]
        if not at:
            return [text]
        if at[0]:
            at.insert(0, 0)
        parts = [text[start:end] for start, end in itertools.pairwise(at)]
        parts.append(text[at[-1] :])
        return parts

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """All that the pattern finds, from one lead to the next while these are few."""
        lead, place = self.lead, 0
        if lead:
            for _ in range(LEADS_MAX):
                place = text.find(lead, place)
                if place < 0:
                    return
                found = self.pattern.match(text, place)
                if found is None:
                    place += 1
                else:
                    yield found
                    place = found.end()
        yield from self.pattern.finditer(text, place)


def _is_cut(token: AddedToken, leads: frozenset[str]) -> bool:
    return token.content[0] in leads and not token.lstrip and not token.single_word


# -- a pattern that finds the longest of many words -----------------------------------------------

_Trie = dict[str, "_Trie"]
_END: Final = ""


def longest_of(words: Iterable[str]) -> re.Pattern[str]:
    """A trie: however many words there are, a place in a text is tried once a character."""
    trie: _Trie = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_alternatives(trie))


def _alternatives(node: Mapping[str, _Trie]) -> str:
    branches = [_branch(character, child) for character, child in node.items() if character]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if _END in node else joined  # greedy: the longest


def _branch(character: str, node: _Trie) -> str:
    """Characters up to the next fork in one go; a long token is not deep nesting."""
    literal = [character]
    while len(node) == 1 and _END not in node:
        ((character, node),) = node.items()
        literal.append(character)
    return re.escape("".join(literal)) + _alternatives(node)
