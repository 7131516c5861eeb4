"""What vLLM makes of requests for gpt-oss. Run with vLLM's own Python; no engine and no model.

`harmony_truth.py record` writes tests/golden/vllm_0_32_harmony.json anew: its bodies stay, those of
vllm_0_32_conversions.json are taken too. `harmony_truth.py compare` reads lines of path, body and
the texts that a router makes of them, and tells whether their token ids are vLLM's.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_SYSTEM_START_DATE"] = DATE = "2026-11-30"

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.online_renderer import OnlineRenderer

GOLDEN = Path(__file__).parents[1] / "golden"
HARMONY = GOLDEN / "vllm_0_32_harmony.json"


def renderer() -> OnlineRenderer:
    """vLLM's, without what needs a model."""
    made = OnlineRenderer.__new__(OnlineRenderer)
    made.parser = None
    made.supports_browsing = made.supports_code_interpreter = False
    made.renderer = SimpleNamespace(tokenizer=None)
    made.model_config = SimpleNamespace(max_model_len=131072)
    return made


def ids_of(path: str, body: dict[str, Any]) -> list[int] | None:
    """Token ids of a request's prompt; None where vLLM refuses it."""
    try:
        if path == "/v1/responses":
            result = renderer()._render_responses_with_harmony(
                ResponsesRequest.model_validate(body),
                previous_messages=None,
                previous_response_outputs=None,
                tool_server=None,
            )
            engine_input = result.engine_input
        else:
            if path == "/v1/messages":
                asked = AnthropicMessagesRequest.model_validate(body)
                request = AnthropicServingMessages.to_chat_completion_request(asked)
            else:
                request = ChatCompletionRequest.model_validate(body)
            with_tools = request.tools is not None
            _, [engine_input] = renderer()._make_request_with_harmony(request, with_tools)
    except Exception as error:  # noqa: BLE001 - whatever it refuses it by
        sys.stderr.write(f"{path}: {type(error).__name__}: {str(error)[:300]}\n")
        return None
    return list(engine_input["prompt_token_ids"])


def record() -> None:
    """Write the file."""
    cases = json.loads(HARMONY.read_text())
    names = {case["name"] for case in cases}
    for case in json.loads((GOLDEN / "vllm_0_32_conversions.json").read_text()):
        if case["name"] not in names:
            cases.append({name: case[name] for name in ("name", "path", "body")})
    for case in cases:
        ids = ids_of(case["path"], json.loads(json.dumps(case["body"])))
        case["made"] = None if ids is None else get_encoding().decode(ids)
    HARMONY.write_text(json.dumps(cases, indent=1) + "\n")


def compare() -> None:
    """A line for each line."""
    encoding = get_encoding()
    for line in sys.stdin:
        path, body, texts = json.loads(line)
        ours = [one for text in texts for one in encoding.encode(text, allowed_special="all")]
        sys.stdout.write(json.dumps(ours == ids_of(path, body)) + "\n")


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]]()
