"""System messages go where vLLM 0.32 puts them for a template."""

from typing import Any

import pytest

from router.tokens.system_roles import SystemRoles

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
KNOWS = PLAIN + "{# 'developer' #}"


def said(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    """Messages of these roles and contents."""
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("templates", "inline", "developer"),
    [
        ([PLAIN], True, False),
        ([STRICT], False, False),
        ([KNOWS], True, True),
        ([KNOWS, STRICT], False, False),
        ([""], False, False),
        (["{% broken"], False, False),
        (["{{ messages[0].content + 1 }}"], False, False),
    ],
)
def test_what_a_template_takes_is_found_by_asking_it(
    *, templates: list[str], inline: bool, developer: bool
) -> None:
    """One that refuses, or is none, takes nothing out of the ordinary."""
    roles = SystemRoles.of(templates)
    assert (roles.takes_inline, roles.takes_developer) == (inline, developer)


def test_what_is_said_to_the_system_goes_to_the_front_where_it_has_to() -> None:
    """As one text, without anything between its parts."""
    talk = said(("system", "S1S2"), ("user", "a"), ("system", "inline"), ("user", "b"))
    assert SystemRoles.of([PLAIN]).merged(talk) == talk
    assert SystemRoles.of([STRICT]).merged(talk) == said(
        ("system", "S1S2inline"), ("user", "a"), ("user", "b")
    )
    assert SystemRoles.of([STRICT]).merged(talk[1:2]) == talk[1:2]


@pytest.mark.parametrize(
    ("talk", "expected"),
    [
        (said(("developer", "d"), ("user", "a")), said(("system", "d"), ("user", "a"))),
        (said(("user", "a"), ("developer", "d")), said(("system", "d"), ("user", "a"))),
        (
            said(("system", "s"), ("developer", "d"), ("user", "a"), ("system", "")),
            said(("system", "s\n\nd"), ("user", "a")),
        ),
        (
            said(("user", "a"), ("developer", [{"type": "text", "text": "d"}])),
            said(("system", "d"), ("user", "a")),
        ),
        (said(("user", "a"), ("system", "s")), said(("user", "a"), ("system", "s"))),
    ],
)
def test_developers_become_the_system_where_the_template_does_not_know_them(
    talk: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    """And then there is one system message, in front; without a developer nothing is moved."""
    assert SystemRoles.of([PLAIN]).without_developers(talk) == expected
    assert SystemRoles.of([KNOWS]).without_developers(talk) == talk
