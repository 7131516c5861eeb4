"""What both legs of a request are asked, read by vLLM's own request models; no engine runs."""

import json
import subprocess
from typing import Any

import pytest

from router.requests.api_call import ApiCall, TextPrompt
from router.requests.parting import decode_call, prefill_call
from tests.vllm.settings import VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

READ = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
models = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
for line in sys.stdin:
    path, body = json.loads(line)
    request = models[path](**body)
    sampling = request.to_sampling_params(request.max_tokens or 50, {})
    transfer = (sampling.extra_args or {}).get("kv_transfer_params")
    print(json.dumps([request.stream, sampling.max_tokens, sampling.min_tokens, transfer]))
"""
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 50, **STREAMED},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 50, **STREAMED}),
]
HELD = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}


def test_vllm_takes_both_legs() -> None:
    """One token, not streamed, to be kept; then the client's own request, and what is held."""
    lines = []
    for path, body in ASKED:
        call = ApiCall(
            path=path,
            endpoint=path,
            body=json.dumps(body).encode(),
            headers=(),
            request_id="r",
            model="m",
            stream=True,
            prompt=TextPrompt(texts=("a",)),
        )
        legs = prefill_call(call), decode_call(call, json.dumps(HELD).encode())
        lines += [json.dumps([path, json.loads(leg.body)]) for leg in legs]
    command = [str(VLLM_PYTHON), "-W", "ignore", "-c", READ]
    read = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert read.returncode == 0, read.stderr[-2000:]
    told = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("[")]
    assert [one[:3] for one in told] == [[False, 1, 0], [True, 50, 5]] * 2
    assert [one[3]["do_remote_decode"] for one in told[::2]] == [True, True]
    assert [one[3] for one in told[1::2]] == [HELD, HELD]
