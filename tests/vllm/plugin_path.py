"""The project's wheel, installed as an operator does it: beside vLLM, without our dependencies."""

import subprocess
import sys
from pathlib import Path

from tests.vllm.settings import ROOT, VLLM_PYTHON

_BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
_BUILD_S = 60.0


def plugin_path(folder: Path) -> str:
    """PYTHONPATH for a vLLM that shall find the plugins: a folder with what the wheel brings."""
    folder.mkdir(parents=True, exist_ok=True)
    built = _output(sys.executable, "-c", _BUILD, str(folder)).splitlines()[-1]
    installed = folder / "installed"
    # pip runs in vLLM's interpreter, but an environment made without pip has none of its own.
    _output(
        *(sys.executable, "-m", "pip", "--python", str(VLLM_PYTHON), "install", "--quiet"),
        *("--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile"),
        *("--upgrade", "--target", str(installed), str(folder / built)),
    )
    return str(installed)


def _output(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
