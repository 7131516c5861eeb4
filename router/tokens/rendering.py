"""Chats as text, as transformers' `apply_chat_template` renders them, for less.

Most of what that spends goes into copying messages, three times and value by value, in case they
hold objects whose methods a template must not reach. What was read from JSON holds none, and the
sandbox lets no template change it. So the compiled template is given the same names directly. What
is not of that kind, and whatever the two render differently when a tokenizer is loaded, is left to
`apply_chat_template`.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import jinja2
import jinja2.sandbox

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""What a template may read it by; the first that is there fills the first two."""

_OF_DICT: Final = frozenset(dir(dict))

_Objects = Sequence[dict[str, Any]]
_Names = dict[str, Any]

_CALL: Final = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": [1, None, "\u00e9<"]}},
}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
}
_CHAT: Final[_Objects] = (
    {"role": "user", "content": "Which is it?\n"},
    {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [_CALL]},
    {"role": "tool", "content": "t", "tool_call_id": "c", "name": None},
    {"role": "assistant", "content": " This. ", "reasoning_content": "r"},
    {"role": "user", "content": "Sure?"},
)
_BATTERY: Final[Sequence[_Objects]] = (
    _CHAT,
    _CHAT[:1],
    _CHAT[3:],
    ({"role": "system", "content": "s"}, *_CHAT),
    [
        message | {"content": [{"type": "text", "text": str(message["content"])}]}
        for message in _CHAT
    ],
)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, quick where a template reads a field of a message."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As inherited, which first looks for an attribute that no dict has."""
        if type(obj) is dict and attribute not in _OF_DICT:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class Rendering:
    """A model's chat template. Safe in several threads.

    Args:
        tokenizer: transformers'.

    Attributes:
        direct: whether any chat is rendered without `apply_chat_template`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._compiled: dict[str, jinja2.Template] = {}
        self._reserved: frozenset[str] = frozenset()
        try:
            self._prepare()
        except Exception:  # noqa: BLE001 - another version of the library; it still renders
            self._compiled = {}
        self.direct = bool(self._compiled)

    def is_direct(self, names: Collection[str], *, continue_final_message: bool) -> bool:
        """Whether a chat with these further names is rendered without `apply_chat_template`."""
        return self.direct and not continue_final_message and self._reserved.isdisjoint(names)

    def render(
        self,
        messages: _Objects,
        *,
        tools: _Objects | None,
        documents: _Objects | None,
        template_kwargs: _Names,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The text that the template makes of a conversation; it raises what it likes.

        Args:
            messages: as `chat_template.conversation` makes them; this and the others as JSON has
                values.
            tools: as are all others, what `apply_chat_template` takes by that name.
            documents: of the request.
            template_kwargs: further names that the template knows.
            add_generation_prompt: end with what an answer begins with.
            continue_final_message: leave the last message open.
        """
        direct = self.is_direct(template_kwargs, continue_final_message=continue_final_message)
        if messages and direct:
            template = self._compiled.get(self._tokenizer.get_chat_template(None, tools))
            if template is not None:
                names = template_kwargs | {"add_generation_prompt": add_generation_prompt}
                return self._direct(template, messages, tools, documents, names)
        names = template_kwargs | {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self._by_transformers(messages, tools, documents, names)

    def _direct(
        self,
        template: jinja2.Template,
        messages: _Objects,
        tools: Any,
        documents: Any,
        names: _Names,
    ) -> str:
        seen = [_as_seen(message) for message in messages]
        given = {"messages": seen, "tools": tools, "documents": documents}
        return template.render(self._special_tokens | names | given)

    def _by_transformers(
        self, messages: _Objects, tools: Any, documents: Any, names: _Names
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, documents=documents, tokenize=False, **names
        )
        return str(text)

    # -- whether it may ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 - loaded where needed
        from transformers.utils import chat_template_utils as theirs  # noqa: PLC0415 - likewise

        apply = PreTrainedTokenizerBase.apply_chat_template
        if type(self._tokenizer).apply_chat_template is not apply:
            return  # a way of its own
        self._reserved = frozenset({"messages", "conversations"}).union(
            inspect.signature(apply).parameters,
            inspect.signature(theirs.render_jinja_template).parameters,
        )
        of_model = self._tokenizer.chat_template
        for text in of_model.values() if isinstance(of_model, dict) else filter(None, [of_model]):
            environment = theirs._compile_jinja_template(text).environment  # noqa: SLF001 - guarded
            template = _compiled(environment, text)
            if not all(self._alike(template, text, messages) for messages in _BATTERY):
                self._compiled = {}
                return
            self._compiled[text] = template

    def _alike(self, template: jinja2.Template, text: str, messages: _Objects) -> bool:
        """Whether both ways make the same text of a conversation, or both refuse it."""
        for tools in (None, [_TOOL]):
            for add_generation_prompt in (False, True):
                names = {"add_generation_prompt": add_generation_prompt}
                ours, theirs = (
                    _outcome(way)
                    for way in (
                        partial(self._direct, template, messages, tools, None, names),
                        partial(
                            self._by_transformers,
                            messages,
                            tools,
                            None,
                            names | {"chat_template": text},
                        ),
                    )
                )
                if ours != theirs:
                    return False
        return True


def _outcome(way: Callable[[], str]) -> str | None:
    try:
        return way()
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None


def _compiled(theirs: jinja2.Environment, text: str) -> jinja2.Template:
    """Of the template's text, with all that transformers gives to templates."""
    ours = _Sandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.filters.update(theirs.filters)
    ours.globals.update(theirs.globals)
    return ours.from_string(text)


def _as_seen(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers shows it: without keys that say nothing, and its reasoning."""
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message
