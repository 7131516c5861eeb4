"""One model's tokenizer and chat template."""

from dataclasses import dataclass
from typing import Any

from router.errors import DegradedCause, TokensUnknown
from router.requests.api_call import ChatPrompt, TextPrompt
from router.tokens.chat_template import conversation, iterates_parts
from router.tokens.encoder import Encoder
from router.tokens.system_roles import SystemRoles


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer with its chat template. Its methods block and are safe in several threads.

    Attributes:
        tokenizer: transformers' fast tokenizer, for the template.
        encoder: for the ids.
        iterates_parts: the template walks over content parts, so they stay a list.
        system_roles: what the template takes of system messages behind others.
    """

    tokenizer: Any
    encoder: Encoder
    iterates_parts: bool
    system_roles: SystemRoles

    @classmethod
    def load(cls, root: str, *, cache_bytes_max: int) -> "LoadedTokenizer":
        """Load from a directory or hub name; raises whatever transformers raises."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - a second that others need not pay

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
            encoder=Encoder(backend, cache_bytes_max=cache_bytes_max),
            iterates_parts=any(iterates_parts(text) for text in texts),
            system_roles=SystemRoles.of(texts),
        )

    def encode(self, prompt: ChatPrompt | TextPrompt) -> tuple[bytes, ...]:
        """Token ids of each prompt, packed.

        Raises:
            TokensUnknown: the template refused the messages, or the tokenizer a text.
        """
        texts = [self.render(prompt)] if isinstance(prompt, ChatPrompt) else list(prompt.texts)
        try:
            return tuple(self.encoder.encode(texts, add_special_tokens=prompt.add_special_tokens))
        except Exception as error:  # a lone surrogate; a vocabulary without the text's words
            raise TokensUnknown(DegradedCause.TEXT_REFUSED, str(error)) from error

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the model's template makes of a conversation."""
        if prompt.chat_template is not None:
            # Rendering a stranger's template could occupy a thread for ever.
            raise TokensUnknown(
                DegradedCause.TEMPLATE_FAILED, "the request brings its own template"
            )
        arguments = prompt.template_kwargs | {
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
        }
        for reserved in ("conversation", "tools", "documents", "chat_template", "tokenize"):
            arguments.pop(reserved, None)
        messages = prompt.messages
        if prompt.merges_system:
            messages = self.system_roles.merged(messages)
        shown = conversation(messages, iterates_parts=self.iterates_parts)
        try:
            text = self.tokenizer.apply_chat_template(
                self.system_roles.without_developers(shown),
                tools=prompt.tools,
                documents=prompt.documents,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # templates raise what they like
            raise TokensUnknown(DegradedCause.TEMPLATE_FAILED, str(error)) from error
        return str(text)
