"""A chaos run as people start it: two parts are killed under load, and the books balance."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 140


async def test_a_killed_router_and_a_killed_engine_cost_only_what_they_carried(
    tmp_path: Path,
) -> None:
    """The run says so with its exit code, and the summary has the figures of both."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.chaos", "--quick=true", "--workers=2", "--rate=8"),
        *("--faults=router-kill,engine-kill", f"--out_dir={tmp_path}"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, said.decode()
    faults = json.loads((tmp_path / "summary.json").read_text())["faults"]
    assert [fault["name"] for fault in faults] == ["router-kill", "engine-kill"]
    for fault in faults:
        assert fault["requests"] > 0
        assert fault["failed"] == fault["failed_explained"]
        assert fault["counters_zero"]
