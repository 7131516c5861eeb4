"""What the real fleet is made of: paths, names, sizes, flags, deadlines."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("TIMESTABLE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
MODEL = Path(os.environ.get("TIMESTABLE_VLLM_MODEL", ROOT / "build/vllm/model"))
RUN_DIR = ROOT / "build/vllm/run"

HOST = "127.0.0.1"
NAME = "tiny"
ADAPTERS = ("adapter-a", "adapter-b")
BLOCK = 32
"""Tokens; vLLM's CPU attention takes multiples of 32 only."""

CAPACITY_BLOCKS = 96
"""So few that evictions are ordinary; one more than the longest request needs three times over."""

CONTEXT_TOKENS = 1024
RING_BATCHES = 64
"""Ring of engine `b`: losing more than this cannot be replayed."""

LEASE_S = 5.0
"""An instance is chosen no longer than this after its sidecar's last heartbeat."""

ENGINE_READY_S = 600.0
"""A start is nearly all imports: 50 s alone on two cores, minutes when others compute."""

READY_S = 60.0
STOP_S = 10.0

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /sleep
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # previous_response_id, background
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in one process
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
ENGINE_FLAGS = (
    *("--block-size", str(BLOCK), "--max-model-len", str(CONTEXT_TOKENS)),
    *("--num-gpu-blocks-override", str(CAPACITY_BLOCKS), "--max-num-seqs", "16"),
    "--enable-scale-out",  # /inference/v1/generate
    *("--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni"),
    # Tools and schemas: a random model would write white space until its tokens are used up.
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
