"""Cohere's chat, as vLLM 0.32 takes it."""

from typing import Annotated, Any

from pydantic import Field

from router.requests.api_call import ApiCall
from router.requests.body_fields import Body, ModelName, checked, json_object
from router.requests.chat_messages import (
    Messages,
    Objects,
    history_share,
    opaque_conversation,
    template_message,
    turns,
)
from router.requests.received import Received


class _CohereBody(Body):
    model: ModelName
    messages: Messages
    tools: Objects | None = None
    documents: Any = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


def parse_cohere_chat(received: Received) -> ApiCall:
    """`/cohere/v2/chat`; see `received.Parse`.

    Documents, citations and safety modes are put into the prompt in ways that only the engine
    knows: it is looked up by its text.
    """
    body = checked(_CohereBody, json_object(received.body))
    shown = [template_message(message) for message in body.messages]
    return received.call(
        model=body.model,
        stream=bool(body.stream),
        prompt=opaque_conversation(shown, [body.documents, body.tools]),
        prompt_field="messages",
        turn=turns(body.messages),
        history_share=history_share(body.messages),
        cache_salt=body.cache_salt,
        output_tokens_max=body.max_tokens,
    )
