"""System messages that do not stand first, and developers', as vLLM 0.32 arranges them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2
import jinja2.sandbox

_PROBE: Final = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRoles:
    """What a model's template takes.

    Attributes:
        takes_developer: it knows that role.
        takes_inline: it renders a system message behind others; asked as vLLM asks it, without
            anything that transformers adds to a template.
    """

    takes_developer: bool
    takes_inline: bool

    @classmethod
    def of(cls, templates: Iterable[str]) -> "SystemRoles":
        """Of all templates that the model has; it takes what every one of them takes."""
        texts = list(templates)
        return cls(
            takes_developer=all("'developer'" in t or '"developer"' in t for t in texts),
            takes_inline=all(map(_renders_inline, texts)),
        )

    def merged(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Anthropic's conversation: all that is said to the system in front, where it has to be."""
        said = [message["content"] or "" for message in messages if message["role"] == "system"]
        if self.takes_inline or not said:
            return list(messages)
        others = [message for message in messages if message["role"] != "system"]
        return [{"role": "system", "content": "".join(said)}, *others]

    def without_developers(self, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation as a template is given it: theirs become the system's, which are one."""
        if self.takes_developer or all(message["role"] != "developer" for message in shown):
            return shown
        systems, others = [], []
        for message in shown:
            if message["role"] in ("system", "developer"):
                systems.append({k: v for k, v in message.items() if k != "tools"})
            else:
                others.append(message)
        if len(systems) == 1 and shown[0]["role"] in ("system", "developer"):
            return [systems[0] | {"role": "system"}, *others]
        texts = [_text(message["content"]) for message in systems]
        content = "\n\n".join(text for text in texts if text)
        return [{"role": "system", "content": content}, *others]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _renders_inline(template: str) -> bool:
    if not template:
        return False
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    try:
        environment.from_string(template).render(messages=_PROBE, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return False
    return True
