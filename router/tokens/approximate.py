"""Prompts whose token ids are not to be had: their text in chunks, in place of tokens in blocks.

The pieces of a conversation (roles, texts, identities of media) become one string of bytes; equal
beginnings of conversations are equal beginnings of strings. It is cut into chunks of as many bytes
as a block has tokens, times BYTES_PER_TOKEN_ESTIMATE, and hashed like blocks under a root of its
own. So a depth in chunks is a depth in blocks by estimate, and the same index answers. Pure.
"""

import json
import re
from typing import Final

from indexer.contract import block_hash
from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.limits import NOTICE_BLOCKS_MAX, PROMPT_TOKENS_MAX
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, ChatPrompt, OpaquePrompt, TextPrompt, TokenPrompt
from router.requests.chat_messages import opaque_conversation
from router.tokens.tokenize import BYTES_PER_TOKEN_ESTIMATE, EncodedPrompt

MEDIA_TOKENS_ESTIMATE: Final = 1024
"""Of an image, a sound, a film: small models take some 500, large pictures several thousand."""

END_OF_PIECE: Final = b"\x00"

_MEDIA: Final = re.compile(r"[\w.-]{1,64}:[0-9a-f]{32}")
"""`chat_messages.media_identity`."""

assert BYTES_PER_TOKEN_ESTIMATE == TOKEN_BYTES, "a chunk is as long as a packed block"


def estimated(served: ServedModel, call: ApiCall) -> EncodedPrompt:
    """Stand-in for an encoded prompt: a length by estimate, and text to look up.

    No more than the model takes: the engine refuses what is longer and computes none of it. A text
    whose beginning the engine cuts off has none to look up.
    """
    keep = call.truncate_prompt_tokens
    limit_tokens = served.max_model_len_tokens if keep in {None, -1} else keep
    texts = _texts(call, PROMPT_TOKENS_MAX if limit_tokens is None else limit_tokens)
    tokens = [max(1, len(text) // BYTES_PER_TOKEN_ESTIMATE) for text in texts]
    if not any(texts):
        tokens = [max(1, len(call.body) // BYTES_PER_TOKEN_ESTIMATE)]
    text = b"" if keep and limit_tokens and tokens[0] > limit_tokens else texts[0]
    if limit_tokens is not None:
        tokens = [min(one, max(limit_tokens, 1)) for one in tokens]
    return EncodedPrompt(
        packed=b"",
        prompt_tokens=sum(tokens),
        longest_tokens=0,
        last_packed=b"",
        text=text[: tokens[0] * BYTES_PER_TOKEN_ESTIMATE],
    )


def chain(text: bytes, served: ServedModel, call: ApiCall) -> bytes:
    """Hashes of all whole chunks, concatenated, as `block_hash.chain` makes them of tokens.

    Of a longer text than a notice can tell, nobody learns the rest, so it is not looked up either.
    """
    if not text or not call.reads_prefixes:
        return b""
    fleet = served.fleet
    root = block_hash.approximate_root(
        model_scope=fleet.model_scope,
        block_size_tokens=fleet.block_size_tokens,
        adapter=served.adapter,
        salt=call.cache_salt,
    )
    bytes_max = NOTICE_BLOCKS_MAX * fleet.block_size_tokens * BYTES_PER_TOKEN_ESTIMATE
    return block_hash.chain(root, text[:bytes_max], fleet.block_size_tokens)


def _texts(call: ApiCall, tokens_max: int) -> list[bytes]:
    """Each prompt as one string of bytes; at least one. One too long by estimate may be cut."""
    bytes_max = (max(tokens_max, 1) + 1) * BYTES_PER_TOKEN_ESTIMATE
    match call.prompt:
        case ChatPrompt() as chat:
            pieces = opaque_conversation(chat.messages, chat.tools).pieces
            documents = (json.dumps(chat.documents),) if chat.documents else ()
            return [_joined((*documents, *pieces), bytes_max)]
        case OpaquePrompt(pieces=pieces, media_count=media_count):
            return [_joined(pieces, bytes_max, has_media=media_count > 0)]
        case TextPrompt(texts=texts):
            return [_bytes(text) for text in texts]
        case TokenPrompt(packed=packed):
            return list(packed)


def _joined(pieces: tuple[str, ...], bytes_max: int, *, has_media: bool = False) -> bytes:
    """Pieces one after the other; a medium is as long as the tokens it is taken for.

    No piece follows once there are bytes_max: a medium may be a hundred times as long here as it
    was in the request.
    """
    parts: list[bytes] = []
    length_bytes = 0
    for piece in pieces:
        if length_bytes >= bytes_max:
            break
        part = _bytes(piece) + END_OF_PIECE
        if has_media and _MEDIA.fullmatch(piece):
            length = MEDIA_TOKENS_ESTIMATE * BYTES_PER_TOKEN_ESTIMATE
            part = (part * (length // len(part) + 1))[:length]
        parts.append(part)
        length_bytes += len(part)
    return b"".join(parts)


def _bytes(text: str) -> bytes:
    """As UTF-8, half surrogate pairs included, which JSON can bring."""
    return text.encode("utf-8", "surrogatepass")
