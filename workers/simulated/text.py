"""Text and token ids of the simulated model: tokenizer, chat template, words of the answers."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from workers.simulated.request import output_index

if TYPE_CHECKING:
    import jinja2

SHIPPED_TOKENIZER = Path(__file__).parent / "tokenizer"
OFF_LOOP_CHARS = 8_192
"""Longer texts are encoded in a thread: this many take about 2 ms."""

_WORD = re.compile(r"Ġ[a-z]{2,}")  # a space and letters, in the byte-level alphabet
_WORDS_MIN = 100


class TextModelError(ValueError):
    """The tokenizer's folder cannot be used; the message says what is missing."""


class TextError(ValueError):
    """A request's text cannot become tokens: the chat template refuses it, or it is not Unicode."""


class TextModel:
    """What turns requests into token ids and output positions into text.

    Attributes:
        folder: holds tokenizer.json and tokenizer_config.json; announced as the model's root.
        vocabulary_size: ids at or above it do not exist.
        output_ids: ids that answers are made of: whole words with a space before them. Their text
            is valid UTF-8 each on its own, and encoding an answer gives its ids again, so that the
            next turn of a chat hits the blocks its last answer filled.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer.

        Raises:
            TextModelError: a file is missing or malformed, or the vocabulary has no words.
        """
        self.folder = folder.resolve()
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TextModelError(f"{path} does not exist; point the tokenizer path at its folder")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise TextModelError(f"{path}: {error}") from error
        vocabulary = self._tokenizer.get_vocab()
        self.vocabulary_size = max(vocabulary.values()) + 1
        words = sorted((i, piece) for piece, i in vocabulary.items() if _WORD.fullmatch(piece))
        if len(words) < _WORDS_MIN:
            raise TextModelError(f"{path}: needs a byte-level vocabulary with {_WORDS_MIN} words")
        self.output_ids = [token_id for token_id, _ in words]
        self._output_texts = [" " + piece[1:] for _, piece in words]
        # Letters and a space need no escaping in JSON.
        self._output_bytes = [text.encode() for text in self._output_texts]

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; a long one is encoded off the event loop.

        Raises:
            TextError: it holds lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not valid Unicode: {error.reason}") from error
        if len(text) > OFF_LOOP_CHARS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call releases the GIL, the single one does not.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def output_id(self, seed: int, position: int) -> int:
        """Token id at a position of the answer with this seed."""
        return self.output_ids[output_index(seed, position, len(self.output_ids))]

    def output_text(self, seed: int, position: int) -> str:
        """Text of the token at a position of the answer with this seed."""
        return self._output_texts[output_index(seed, position, len(self.output_ids))]

    def output_json(self, seed: int, position: int) -> bytes:
        """The same text, as the inside of a JSON string."""
        return self._output_bytes[output_index(seed, position, len(self.output_ids))]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, object],
    ) -> str:
        """Messages as the text the model would see.

        Raises:
            TextError: the template refuses them, or there is no template.
        """
        import jinja2  # noqa: PLC0415  # 50 ms that only chat needs

        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **template_arguments},
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TextError(f"chat template: {error}") from error

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.folder / "tokenizer_config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TextError(f"no chat template: {error}") from error
        return config

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {n: t for n in names if isinstance(t := self._config.get(n), str)}

    @cached_property
    def _template(self) -> "jinja2.Template":
        """Compiled in the environment that transformers gives chat templates."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        source = self._config.get("chat_template")
        separate = self.folder / "chat_template.jinja"
        if source is None and separate.is_file():
            source = separate.read_text(encoding="utf-8")
        if not isinstance(source, str):
            raise TextError(f"{self.folder} has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TextError(message)
