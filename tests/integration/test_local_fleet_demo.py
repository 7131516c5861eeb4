"""The demo end to end in its quick form: sound figures, and nothing left when it is interrupted."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from processes import children

from deploy.demo.summary import PolicyResult

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


async def start_demo(out_dir: Path) -> asyncio.subprocess.Process:
    """Start the quick demo with the generated workload."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.demo", "--quick=true", "--trace=generated"),
        f"--out_dir={out_dir}",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


def running(pids: set[int]) -> set[int]:
    """Which of these processes are still there."""
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


async def test_the_quick_demo_is_sound_and_writes_its_files(tmp_path: Path) -> None:
    """No error, every prediction explained, counters back to zero, both files there."""
    process = await start_demo(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    summary = json.loads((tmp_path / "summary.json").read_text())
    figures = PolicyResult(**summary["policies"]["lmetric"])
    assert (figures.errors, figures.mismatch_unexplained_share) == (0, 0.0)
    assert summary["counters_zero"]
    assert 0 < figures.hit_ratio_actual <= summary["workload"]["ideal_hit_ratio"]
    assert "plotly" in (tmp_path / "report.html").read_text()


async def test_ctrl_c_ends_the_demo_with_130_and_nothing_running(tmp_path: Path) -> None:
    """Interrupted while the fleet serves, it takes the fleet along."""
    process = await start_demo(tmp_path)
    log = tmp_path / "fleet" / "logs" / "router-1.log"
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if log.exists() and "request_routed" in log.read_text():
                break
            await asyncio.sleep(0.05)
        parts = children(process.pid)
        process.send_signal(signal.SIGINT)
        await process.communicate()
    # Redis, two engines with a sidecar each, two routers.
    assert (process.returncode, len(parts), running(parts)) == (130, 7, set())
