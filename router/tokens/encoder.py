"""Text -> token ids, tokenizing only the parts of a text that were not seen before.

The result is the full tokenization's, to the id. That follows from how a fast tokenizer works
(`cuts.py`) for the components named here, and is tried on a battery of texts when a tokenizer is
loaded; where either cannot be said, every text is tokenized whole.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from indexer.contract.block_hash import TOKEN_BYTES, pack_tokens
from router import telemetry
from router.requests.prompt_forms import utf8_bytes
from router.tokens.cuts import Cutter
from router.tokens.part_cache import PartCache
from router.tokens.words import Encode, Words

NORMALIZERS: Final = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    }
)
PRE_TOKENIZERS: Final = frozenset(
    {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"),
        "WhitespaceSplit",
    }
)
POST_PROCESSORS: Final = frozenset(
    {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}
)
MODELS: Final = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
"""Components that work on a piece of text without a look at the pieces around it."""

BATTERY_TOKENS_MAX: Final = 24
"""Added tokens tried at loading, evenly taken from all."""

_PIECES: Final = (
    *("", " ", "\n", "  \n\t ", "hello", "Hello world", " two  spaces ", "\u00e9t\u00e9 e\u0301"),
    *("\u4f60\u597d\u3002", "\U0001f469\u200d\U0001f4bb", "\ufb01 \u2460 \u00a0x", "\u2581a", "'s"),
    *("12345 6.7e8", "def f(x):\n    return x\n", "<", "<|", "|>", "[", "</s", "\u200b", "\x00"),
)


NEW_AT_ONCE_BYTES: Final = 4 * 1024
"""Of text that takes about two milliseconds to tokenize; a question or an answer rarely has more.
"""

CACHED: Final = telemetry.TOKENIZED_TOKENS.labels("cached")
NEW: Final = telemetry.TOKENIZED_TOKENS.labels("new")
WHOLE: Final = telemetry.TOKENIZED_TOKENS.labels("whole")


class CannotCut(Exception):  # noqa: N818 - names a condition
    """Nothing shows that the parts of a text have the ids of the whole; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a tokenizer puts around a text when it adds special tokens, packed."""

    before: bytes
    after: bytes


class Encoder:
    """One tokenizer's token ids. Blocks; safe in several threads.

    Args:
        backend: a `tokenizers.Tokenizer` without truncation and padding.
        cache_bytes_max: for parts of texts; 0 tokenizes every text whole.

    Attributes:
        whole_reason: why every text is tokenized whole; None where parts are exact.
    """

    def __init__(self, backend: Any, *, cache_bytes_max: int) -> None:
        self._backend = backend
        self._parts: Parts | None = None
        self.whole_reason: str | None = None
        if not cache_bytes_max:
            self.whole_reason = "switched off: tokenize_cache_bytes is 0"
            return
        try:
            self._parts = _parts(backend, PartCache(cache_bytes_max))
        except CannotCut as reason:
            self.whole_reason = str(reason)
        except Exception as error:  # noqa: BLE001 - a vocabulary without words for the battery
            self.whole_reason = f"it refuses a text of the battery: {error}"

    @property
    def cache_bytes(self) -> int:
        """Held for texts that were tokenized."""
        return 0 if self._parts is None else self._parts.cache.held_bytes

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Packed token ids of each text.

        Raises:
            UnicodeEncodeError: a text holds a lone surrogate.
        """
        _refuse_surrogates(texts)
        if self._parts is None:
            return self._whole(texts, add_special_tokens=add_special_tokens)
        return self._parts.encode(texts, add_special_tokens=add_special_tokens)

    def encode_at_once(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[bytes] | None:
        """As `encode`, or None where that would take long: NEW_AT_ONCE_BYTES, `cuts.FOUND_MAX`."""
        _refuse_surrogates(texts)
        if self._parts is not None:
            return self._parts.encode_at_once(texts, add_special_tokens=add_special_tokens)
        if not is_little(texts):
            return None
        return self._whole(texts, add_special_tokens=add_special_tokens)

    def _whole(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        packed = _encode(self._backend, texts, add_special_tokens=add_special_tokens)
        WHOLE.inc(_count(packed))
        return packed


def is_little(texts: Iterable[str]) -> bool:
    """Whether these texts together have at most NEW_AT_ONCE_BYTES."""
    return sum(map(utf8_bytes, texts)) <= NEW_AT_ONCE_BYTES


def _refuse_surrogates(texts: Iterable[str]) -> None:
    for text in texts:
        if not text.isascii():
            text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Encodes part by part.

    Attributes:
        new: ids of parts that were not seen before, without special tokens around them.
        cutter: makes parts of texts.
        cache: of parts.
        frame: of texts.
    """

    new: Encode
    cutter: Cutter
    cache: PartCache
    frame: Frame

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Packed token ids of each text; what is new of all of them is tokenized in one go."""
        cut = [self.cutter.cut(text) for text in texts]
        parts = _all_of(cut)
        found = self.cache.get(parts)
        return self._joined(cut, self._completed(parts, found), add_special_tokens)

    def encode_at_once(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[bytes] | None:
        """See `Encoder.encode_at_once`."""
        cut = []
        for text in texts:
            few = self.cutter.cut_few(text)
            if few is None:
                return None
            cut.append(few)
        parts = _all_of(cut)
        found = self.cache.get(parts)
        if None in found and not is_little(_missing(parts, found)):
            return None
        return self._joined(cut, self._completed(parts, found), add_special_tokens)

    def _completed(self, parts: Sequence[str], found: Sequence[bytes | None]) -> Iterable[bytes]:
        """Ids of all parts, of which these were found."""
        known = [ids for ids in found if ids is not None]
        CACHED.inc(_count(known))
        if len(known) == len(parts):
            return known
        missing = _missing(parts, found)
        packed = self.new(missing)
        NEW.inc(_count(packed))
        new = dict(zip(missing, packed, strict=True))
        self.cache.put(new)
        return [new[part] if ids is None else ids for part, ids in zip(parts, found, strict=True)]

    def _joined(
        self, cut: Sequence[Sequence[str]], ids: Iterable[bytes], add_special_tokens: bool
    ) -> list[bytes]:
        """Ids of parts as ids of texts."""
        remaining = iter(ids)
        packed = [b"".join(itertools.islice(remaining, len(parts))) for parts in cut]
        if add_special_tokens:
            packed = [self.frame.before + one + self.frame.after for one in packed]
        return packed


def _all_of(cut: list[list[str]]) -> list[str]:
    return cut[0] if len(cut) == 1 else list(itertools.chain.from_iterable(cut))


def _missing(parts: Sequence[str], found: Sequence[bytes | None]) -> list[str]:
    """Those that were not found, each of them once."""
    return list({part: None for part, ids in zip(parts, found, strict=True) if ids is None})


def _encode(backend: Any, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
    # The batch call releases the GIL, the single one does not.
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [pack_tokens(encoding.ids) for encoding in encodings]


def _count(packed: Iterable[bytes]) -> int:
    return sum(map(len, packed)) // TOKEN_BYTES


# -- what must hold -------------------------------------------------------------------------------


def _parts(backend: Any, cache: PartCache) -> Parts:
    """Raises CannotCut unless parts are exact."""
    _look_at(backend)
    added = list(backend.get_added_tokens_decoder().values())
    try:
        cutter = Cutter.of(added)
    except RecursionError as error:  # tokens that are beginnings of each other, hundreds deep
        raise CannotCut("its added tokens are too entangled") from error
    if cutter is None:
        raise CannotCut("it has no added token that a text can be cut at")
    frame = _frame(backend)
    for text in battery(sorted(token.content for token in added)):
        parts = b"".join(_encode(backend, cutter.cut(text), add_special_tokens=False))
        for special, ours in ((False, parts), (True, frame.before + parts + frame.after)):
            if [ours] != _encode(backend, [text], add_special_tokens=special):
                raise CannotCut(f"the parts of {text[:80]!r} have other ids than the whole")
    plain = partial(_encode, backend, add_special_tokens=False)
    words = Words.of(backend, cutter, plain)
    new = plain if words is None else words.encode
    return Parts(new=new, cutter=cutter, cache=cache, frame=frame)


def _look_at(backend: Any) -> None:
    """Raises CannotCut where a component is not known to work piece by piece."""
    model = type(backend.model).__name__
    if model not in MODELS:
        raise CannotCut(f"nothing is known of its model, {model}")
    if getattr(backend.model, "dropout", None):
        raise CannotCut("its merges drop out at random")
    for name, known in (
        ("normalizer", NORMALIZERS),
        ("pre_tokenizer", PRE_TOKENIZERS),
        ("post_processor", POST_PROCESSORS),
    ):
        component = getattr(backend, name)
        if component is None:
            continue
        try:
            state = json.loads(component.__getstate__())
        except Exception as error:  # a component written in Python
            raise CannotCut(f"its {name} is its own") from error
        unknown = sorted(_types(state) - known)
        if unknown:
            raise CannotCut(f"nothing is known of its {name}, {', '.join(unknown)}")
    if backend.encode_special_tokens:
        raise CannotCut("it takes special tokens for text")


def _types(state: dict[str, Any]) -> set[str]:
    """Of a component and, if it is a sequence, of what it is made of."""
    found = {str(state.get("type"))}
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in state.get(name, ()):
            found |= _types(inner)
    return found


def _frame(backend: Any) -> Frame:
    """Found around the ids of a text; the battery shows whether it is there around every one."""
    bare, framed = (
        _encode(backend, ["hello world"], add_special_tokens=special)[0]
        for special in (False, True)
    )
    at = framed.find(bare)
    while at % TOKEN_BYTES and at > 0:
        at = framed.find(bare, at + 1)
    if not bare or at < 0:
        raise CannotCut("its post-processor changes more than the ends of a text")
    return Frame(before=framed[:at], after=framed[at + len(bare) :])


def battery(tokens: Sequence[str]) -> Iterator[str]:
    """Texts in which added tokens meet all sorts of neighbours; the same each time."""
    yield from _PIECES
    step = max(1, len(tokens) // BATTERY_TOKENS_MAX)
    chosen = list(tokens)[::step]
    pieces = itertools.cycle(_PIECES)
    for token, other in zip(chosen, reversed(chosen), strict=True):
        for _ in range(3):
            left, middle, right = next(pieces), next(pieces), next(pieces)
            yield left + token + middle + other + right
        yield token + other + token
        yield token[:-1] + other + token[1:]
        next(pieces)  # so that another round meets other neighbours
