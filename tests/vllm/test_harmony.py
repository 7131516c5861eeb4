"""Token ids of requests for gpt-oss, by vLLM's own renderer; no engine and no model."""

import json
import subprocess

import pytest

from router.tokens.harmony import rendered
from tests.unit.router.tokens.test_harmony import CASES, DATE, NOT_KNOWN, prompt_of
from tests.vllm.settings import VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_texts_have_the_engines_token_ids() -> None:
    """One after the other, also where a message comes in parts that are tokenized by themselves."""
    lines = []
    for case in CASES:
        if case["made"] is not None and case["name"] not in NOT_KNOWN:
            prompt = prompt_of(case)
            texts = rendered(prompt.said or (), tools=prompt.tools, effort=prompt.effort, date=DATE)
            lines.append(json.dumps([case["path"], case["body"], texts]))
    command = [str(VLLM_PYTHON), "-W", "ignore", "tests/vllm/harmony_truth.py", "compare"]
    compared = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0, compared.stderr[-2000:]
    told = [line for line in compared.stdout.splitlines() if line in ("true", "false")]
    assert told == ["true"] * len(lines)
