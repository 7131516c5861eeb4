"""Fills tests/golden/vllm_0_32_conversions.json: what vLLM makes of bodies before its template.

Run with vLLM's own Python: `.venv-vllm/bin/python tests/vllm/record_conversions.py`. No engine and
no model are needed. Cases are kept; what they became is written anew.
"""

import json
from pathlib import Path
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers import chat_utils

GOLDEN = Path(__file__).parents[1] / "golden/vllm_0_32_conversions.json"


class _NoMedia:
    """Stands in for what collects media, of which there are none."""

    class model_config:  # noqa: N801 - vLLM's name
        enable_prompt_embeds = False

    def create_parser(self, **_: Any) -> "_NoMedia":
        return self

    def mm_placeholder_storage(self) -> dict[str, Any]:
        return {}


def shown(messages: Any, content_format: str) -> list[dict[str, Any]]:
    """The conversation that a template is given."""
    out: list[dict[str, Any]] = []
    for message in json.loads(json.dumps(list(messages), default=list)):
        out += chat_utils._parse_chat_message_content(message, _NoMedia(), content_format, False)
    chat_utils._postprocess_messages(out)
    return out


def of_chat(request: ChatCompletionRequest) -> dict[str, Any]:
    """Messages, tools and arguments of a template."""
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
    return {"messages": request.messages, "tools": tools, "kwargs": kwargs}


def converted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of a body."""
    if path == "/v1/responses":
        request = ResponsesRequest.model_validate(body)
        made = {
            "messages": construct_input_messages(
                request_instructions=request.instructions, request_input=request.input
            ),
            "tools": construct_tool_dicts(request.tools, request.tool_choice),
            "kwargs": request.build_chat_params(None, "auto").chat_template_kwargs,
        }
    elif path == "/v1/messages":
        asked = AnthropicMessagesRequest.model_validate(body)
        made = of_chat(AnthropicServingMessages.to_chat_completion_request(asked))
    else:
        made = of_chat(ChatCompletionRequest.model_validate(body))
    messages = made.pop("messages")
    return made | {"string": shown(messages, "string"), "openai": shown(messages, "openai")}


def main() -> None:
    """Write the file."""
    cases = json.loads(GOLDEN.read_text())
    for case in cases:
        body = json.loads(json.dumps(case["body"]))
        case["made"] = converted(case["path"], body)
    GOLDEN.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
