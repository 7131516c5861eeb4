"""One model's tokenizer and chat template."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from router.errors import DegradedCause, TokensUnknown
from router.requests.api_call import ChatPrompt, TextPrompt
from router.tokens.chat_template import conversation, iterates_parts
from router.tokens.encoder import Encoder
from router.tokens.harmony import is_harmony, rendered
from router.tokens.rendering import Rendering
from router.tokens.system_roles import SystemRoles

_IMPORTING: Final = threading.Lock()
"""The library's lazy modules cannot be imported by two threads at once."""

_OURS: Final = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message"),
    }
)
"""What a request cannot give its template by these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer with its chat template. Its methods block and are safe in several threads.

    Attributes:
        tokenizer: transformers' fast tokenizer.
        rendering: for the template.
        encoder: for the ids.
        iterates_parts: the template walks over content parts, so they stay a list.
        system_roles: what the template takes of system messages behind others.
        harmony: it is gpt-oss's, whose chats no template renders (`harmony.py`).
    """

    tokenizer: Any
    rendering: Rendering
    encoder: Encoder
    iterates_parts: bool
    system_roles: SystemRoles
    harmony: bool = False

    @classmethod
    def load(cls, root: str, *, cache_bytes_max: int) -> "LoadedTokenizer":
        """Load from a directory or hub name; raises whatever transformers raises."""
        with _IMPORTING:
            from transformers import AutoTokenizer  # noqa: PLC0415 - a second others need not pay
            from transformers.utils import chat_template_utils  # noqa: F401, PLC0415 - `Rendering`

        tokenizer = AutoTokenizer.from_pretrained(root)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{root} has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        template = tokenizer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template or ""]
        return cls(
            tokenizer=tokenizer,
            rendering=Rendering(tokenizer),
            encoder=Encoder(backend, cache_bytes_max=cache_bytes_max),
            iterates_parts=any(iterates_parts(text) for text in texts),
            system_roles=SystemRoles.of(texts),
            harmony=is_harmony(
                token.content for token in backend.get_added_tokens_decoder().values()
            ),
        )

    def encode(self, prompt: ChatPrompt | TextPrompt) -> tuple[bytes, ...]:
        """Token ids of each prompt, packed.

        Raises:
            TokensUnknown: the template refused the messages, or the tokenizer a text.
        """
        return self.ids(prompt, self.texts(prompt))

    def renders_directly(self, prompt: ChatPrompt | TextPrompt) -> bool:
        """Whether its text is made without transformers, which copies and looks at every value."""
        if isinstance(prompt, TextPrompt) or self._in_harmony(prompt):
            return True
        return self.rendering.is_direct(
            _theirs(prompt.template_kwargs), continue_final_message=prompt.continue_final_message
        )

    def texts(self, prompt: ChatPrompt | TextPrompt) -> tuple[str, ...]:
        """What is tokenized; raises TokensUnknown as `encode` does."""
        if not isinstance(prompt, ChatPrompt):
            return prompt.texts
        return self._harmony(prompt) if self._in_harmony(prompt) else (self.render(prompt),)

    def ids(self, prompt: ChatPrompt | TextPrompt, texts: Sequence[str]) -> tuple[bytes, ...]:
        """Token ids of a prompt's texts; raises TokensUnknown as `encode` does."""
        try:
            packed = self.encoder.encode(texts, add_special_tokens=self._adds_special(prompt))
        except Exception as error:  # a lone surrogate; a vocabulary without the text's words
            raise TokensUnknown(DegradedCause.TEXT_REFUSED, str(error)) from error
        return self._of_prompts(prompt, packed)

    def ids_at_once(
        self, prompt: ChatPrompt | TextPrompt, texts: Sequence[str]
    ) -> tuple[bytes, ...] | None:
        """As `ids`, or None where that would hold up an event loop."""
        special = self._adds_special(prompt)
        try:
            packed = self.encoder.encode_at_once(texts, add_special_tokens=special)
        except Exception as error:  # as above
            raise TokensUnknown(DegradedCause.TEXT_REFUSED, str(error)) from error
        return None if packed is None else self._of_prompts(prompt, packed)

    def _in_harmony(self, prompt: ChatPrompt | TextPrompt) -> bool:
        return self.harmony and isinstance(prompt, ChatPrompt) and prompt.said is not None

    def _adds_special(self, prompt: ChatPrompt | TextPrompt) -> bool:
        return prompt.add_special_tokens and not self._in_harmony(prompt)

    def _of_prompts(
        self, prompt: ChatPrompt | TextPrompt, packed: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """Ids of texts as ids of prompts: in harmony's format a chat has several texts."""
        return (b"".join(packed),) if self._in_harmony(prompt) else tuple(packed)

    def _harmony(self, prompt: ChatPrompt) -> tuple[str, ...]:
        # The engine's local date, which is taken to be ours.
        date = datetime.now().astimezone().strftime("%Y-%m-%d")
        try:
            return rendered(prompt.said or (), tools=prompt.tools, effort=prompt.effort, date=date)
        except Exception as error:  # what a client sends can be of any shape
            raise TokensUnknown(DegradedCause.TEMPLATE_FAILED, str(error)) from error

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the model's template makes of a conversation."""
        if prompt.chat_template is not None:
            # Rendering a stranger's template could occupy a thread for ever.
            raise TokensUnknown(
                DegradedCause.TEMPLATE_FAILED, "the request brings its own template"
            )
        names = _theirs(prompt.template_kwargs)
        messages = prompt.messages
        if prompt.merges_system:
            messages = self.system_roles.merged(messages)
        shown = conversation(messages, iterates_parts=self.iterates_parts)
        try:
            return self.rendering.render(
                self.system_roles.without_developers(shown),
                tools=prompt.tools,
                documents=prompt.documents,
                template_kwargs=names,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
            )
        except Exception as error:  # templates raise what they like
            raise TokensUnknown(DegradedCause.TEMPLATE_FAILED, str(error)) from error


def _theirs(names: dict[str, Any]) -> dict[str, Any]:
    """What of a request's names for its template are not given by us."""
    if _OURS.isdisjoint(names):
        return names
    return {name: value for name, value in names.items() if name not in _OURS}
