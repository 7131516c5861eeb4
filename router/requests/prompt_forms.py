"""The forms in which prompts come that are no conversation: texts, token ids, lists of either."""

from typing import Any, Final

from indexer.contract.block_hash import pack_tokens
from router.errors import RequestInvalid
from router.requests.api_call import OpaquePrompt, Prompt, TextPrompt, TokenPrompt
from router.requests.body_fields import invalid, kind, refuse_empty
from router.requests.long_ids import LongIds

PROMPTS_MAX: Final = 1024
"""Prompts in one request; each is tokenized and counted."""


def prompt_of(value: object, name: str, *, add_special_tokens: bool) -> TextPrompt | TokenPrompt:
    """The four forms of a prompt: one text or list of token ids, or several of one kind.

    Raises:
        RequestInvalid: it has none of them; with the field's name.
    """
    if isinstance(value, str):
        refuse_empty(value, name)
        return TextPrompt(texts=(value,), add_special_tokens=add_special_tokens)
    if isinstance(value, LongIds):
        return TokenPrompt(packed=(packed(value, name),))
    if not isinstance(value, list):
        missing = "is required" if value is None else f"got {kind(value)}"
        raise invalid(name, f"{missing}; send a string, a list of token ids, or a list of either")
    refuse_empty(value, name)
    first = value[0]
    if isinstance(first, int):
        return TokenPrompt(packed=(packed(value, name),))
    if len(value) > PROMPTS_MAX:
        raise invalid(name, f"holds {len(value)} prompts; at most {PROMPTS_MAX}")
    for index, one in enumerate(value):
        if not isinstance(one, str | list) or isinstance(one, str) != isinstance(first, str):
            raise invalid(
                f"{name}[{index}]",
                f"got {kind(one)}; a list of prompts holds strings only, or lists of ids only",
            )
        refuse_empty(one, f"{name}[{index}]")
    if isinstance(first, str):
        return TextPrompt(texts=tuple(value), add_special_tokens=add_special_tokens)
    return TokenPrompt(packed=tuple(packed(one, f"{name}[{i}]") for i, one in enumerate(value)))


def packed(token_ids: list[Any] | LongIds, name: str) -> bytes:
    """Token ids as little-endian u32.

    Raises:
        RequestInvalid: it holds something else.
    """
    try:
        if isinstance(token_ids, LongIds):
            return token_ids.packed()
        if set(map(type, token_ids)) != {int}:  # `true` would be packed as 1
            raise _no_ids(name)
        return pack_tokens(token_ids)
    except (TypeError, ValueError, OverflowError):
        raise _no_ids(name) from None


def _no_ids(name: str) -> RequestInvalid:
    return invalid(name, "holds something else than token ids (integers from 0 to 4294967295)")


def count(prompt: Prompt) -> int:
    """How many prompts it is for the engine."""
    match prompt:
        case TextPrompt(texts=texts):
            return len(texts)
        case TokenPrompt(packed=packed_prompts):
            return len(packed_prompts)
        case _:
            return 1


def opaque(*texts: str, media: tuple[str, ...] = ()) -> OpaquePrompt:
    """Texts, and identities of media after them, whose token ids the engine alone knows."""
    return OpaquePrompt(
        pieces=(*texts, *media), media_count=len(media), texts_bytes=sum(map(utf8_bytes, texts))
    )


def unless_cut(prompt: Prompt, *, truncates_end: bool) -> Prompt:
    """The same, or an opaque one where the engine cuts the end off, which nothing here does."""
    if not truncates_end:
        return prompt
    match prompt:
        case TextPrompt(texts=texts):
            return opaque(*texts)
        case TokenPrompt(packed=packed_prompts):
            return opaque(*(one.hex() for one in packed_prompts))
        case _:
            return prompt


def utf8_bytes(text: str) -> int:
    """Length of a text as UTF-8; of half a surrogate pair, which JSON can bring, 3."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
