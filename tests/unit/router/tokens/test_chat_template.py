"""Templates see what vLLM shows them."""

from typing import Any

import pytest

from router.tokens.chat_template import conversation, iterates_parts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% for p in m.content|list %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% for m in messages %}{% for p in m.content[1:] %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% for m in messages %}{% for t in m.tool_calls %}{% break %}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% for m in", False),
        ("", False),
    ],
)
def test_a_template_that_walks_over_parts_is_known(template: str, expected: bool) -> None:
    """A loop over the content of a message, in any spelling."""
    assert iterates_parts(template) is expected


PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "http://x"}},
    {"type": "input_text", "text": "b"},
]


@pytest.mark.parametrize(
    ("content", "as_text", "as_parts"),
    [
        ("a", "a", [{"type": "text", "text": "a"}]),
        (None, "", []),
        (
            PARTS,
            "a\nb",
            [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
        ),
        ([{"type": "refusal", "refusal": "no"}], "no", [{"type": "text", "text": "no"}]),
    ],
)
def test_content_becomes_text_or_parts(content: Any, as_text: str, as_parts: list[Any]) -> None:
    """Text parts are joined by newlines where the template wants a string."""
    messages = [{"role": "user", "content": content, "name": "bob"}]
    assert conversation(messages, iterates_parts=False) == [
        {"role": "user", "content": as_text, "name": "bob"}
    ]
    assert conversation(messages, iterates_parts=True) == [
        {"role": "user", "content": as_parts, "name": "bob"}
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"x": 1}', {"x": 1}), ("", {}), (None, {}), ({"y": 2}, {"y": 2})]
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: dict[str, Any]) -> None:
    """They travel as JSON text, and the request itself is not touched."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (shown,) = conversation([message], iterates_parts=False)
    assert shown["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": expected}}]
    assert call["function"] == {"name": "f", "arguments": arguments}
