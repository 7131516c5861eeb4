"""Tokenizers of several models are loaded at the same time, each in a thread of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from router.tokens.loaded import LoadedTokenizer
with ThreadPoolExecutor(4) as threads:
    loads = [threads.submit(LoadedTokenizer.load, "workers/simulated/tokenizer", cache_bytes_max=0)
             for _ in range(4)]
for load in loads:
    load.result()
print("loaded")
"""


def test_models_that_come_together_are_all_loaded() -> None:
    """The library's lazy modules break where two threads are the first to import them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.endswith("loaded\n"), done.stderr[-2000:]
