"""What of a prompt is done on the event loop, because a thread would cost more. Pure.

Going to a thread and back takes some 0.3 ms, and does not help others: a template runs in Python
and holds the interpreter's lock, which the loop may have to wait 5 ms for. So a short conversation
is rendered where it arrived, within some milliseconds, and if little of it is new (see
`encoder.NEW_AT_ONCE_BYTES`) it is tokenized there too. Tokenizing more releases the lock; that is
what threads are for.
"""

from collections.abc import Sequence
from typing import Final

from router.requests.api_call import ApiCall, ChatPrompt, TextPrompt

BYTES_MAX: Final = 128 * 1024
"""Of a body, and characters of the text it is rendered to; cutting that in parts and finding them
takes some 0.3 ms."""

ITEMS_MAX: Final = 256
"""Messages, their parts and calls, tools and documents: a template spends 3 to 10 us on each."""

VALUES_MAX: Final = 2048
"""Of JSON in the whole body, which a template may write out one by one: a tool can be one long list
of them. Written out with indents they take 1.4 ms."""

BESIDE_TEXT_BYTES_MAX: Final = 4096
"""Where the texts of messages are all of a body but so much, it has no more values than that."""


def is_short(prompt: ChatPrompt | TextPrompt, call: ApiCall) -> bool:
    """Whether a prompt may be rendered on the loop."""
    if len(call.body) > BYTES_MAX:
        return False
    if isinstance(prompt, TextPrompt):
        return len(prompt.texts) <= ITEMS_MAX
    items = len(prompt.messages) + len(prompt.tools or ()) + len(prompt.documents or ())
    beside_text = len(call.body)
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, str):
            beside_text -= len(content)
        elif isinstance(content, list):
            items += len(content)
        items += len(message.get("tool_calls") or ())
    if items > ITEMS_MAX:
        return False
    return beside_text <= BESIDE_TEXT_BYTES_MAX or _values_at_most(call.body) <= VALUES_MAX


def _values_at_most(body: bytes) -> int:
    """Each value but one stands behind one of these; so does much of a text."""
    return sum(map(body.count, (b",", b"[", b"{")))


def are_short(texts: Sequence[str]) -> bool:
    """Whether texts may be cut on the loop: what a template makes of a body may be longer."""
    return sum(map(len, texts)) <= BYTES_MAX
