"""Scripts that step real vLLM by hand, in its own environment."""

import json
import os
import signal
import subprocess
from typing import Any, Final

from tests.vllm.settings import ROOT, VLLM_PYTHON

DRIVER_S: Final = 400.0
"""Imports take 20 s on two idle cores, minutes on busy ones."""


def driven(script: str, wanted: dict[str, Any], *, python_path: str | None = None) -> Any:
    """What a script of this folder answers: JSON in, JSON in its last line out.

    Args:
        script: its file name.
        wanted: what it is to do.
        python_path: where else it finds modules.
    """
    process = subprocess.Popen(
        [str(VLLM_PYTHON), str(ROOT / "tests/vllm" / script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | ({} if python_path is None else {"PYTHONPATH": python_path}),
    )
    try:
        output, errors = process.communicate(json.dumps(wanted), timeout=DRIVER_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])
