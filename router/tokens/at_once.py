"""What of a prompt is done on the event loop, because a thread would cost more. Pure.

Going to a thread and back takes some 0.3 ms, and does not help others: a template runs in Python
and holds the interpreter's lock, which the loop may have to wait 5 ms for. So a short conversation
is rendered where it arrived, within about two milliseconds, and if little of it is new (see
`encoder.NEW_AT_ONCE_BYTES`) it is tokenized there too. Tokenizing more releases the lock; that is
what threads are for.
"""

from collections.abc import Sequence
from typing import Final

from router.requests.api_call import ApiCall, ChatPrompt, TextPrompt

BYTES_MAX: Final = 128 * 1024
"""Of a body, and of the text it is rendered to; cutting that in parts and finding them takes some
0.3 ms."""

ITEMS_MAX: Final = 256
"""Messages, their parts and calls, tools and documents: a template spends 3 to 10 us on each."""


def is_short(prompt: ChatPrompt | TextPrompt, call: ApiCall) -> bool:
    """Whether a prompt may be rendered on the loop."""
    if len(call.body) > BYTES_MAX:
        return False
    if isinstance(prompt, TextPrompt):
        return len(prompt.texts) <= ITEMS_MAX
    items = len(prompt.messages) + len(prompt.tools or ()) + len(prompt.documents or ())
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            items += len(content)
        items += len(message.get("tool_calls") or ())
    return items <= ITEMS_MAX


def are_short(texts: Sequence[str]) -> bool:
    """Whether texts may be cut on the loop: what a template makes of a body may be longer."""
    return sum(map(len, texts)) <= BYTES_MAX
