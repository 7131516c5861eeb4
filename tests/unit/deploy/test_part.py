"""One process of the fleet: its end is noticed, told and enforced."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import exists

from deploy.local.errors import PartCrashError
from deploy.local.part import Part

SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)"
)
DEADLINE_S = 10


def make_part(tmp_path: Path, code: str) -> Part:
    """Build a part that runs a line of Python."""
    return Part(name="part-1", command=[sys.executable, "-c", code], log_path=tmp_path / "part.log")


async def eventually(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_a_crash_tells_name_exit_code_and_last_words(tmp_path: Path) -> None:
    """Whoever reads the message knows what to look at."""
    part = make_part(tmp_path, "print('disk is full'); raise SystemExit(3)")
    await part.start()
    with pytest.raises(PartCrashError, match=r"(?s)part-1 .*exit code 3.*disk is full"):
        await part.watch()


async def test_a_crash_by_signal_names_the_signal(tmp_path: Path) -> None:
    """A part killed by somebody else is told as such."""
    part = make_part(tmp_path, SLEEP)
    await part.start()
    os.kill(part.pid, signal.SIGKILL)
    with pytest.raises(PartCrashError, match="SIGKILL"):
        await part.watch()


async def test_a_stop_is_no_crash(tmp_path: Path) -> None:
    """A part that ends because it was asked to is not reported."""
    part = make_part(tmp_path, SLEEP)
    await part.start()
    await part.stop(DEADLINE_S)
    await part.watch()
    assert part.exit_code == -signal.SIGTERM


async def test_a_stubborn_part_is_killed_after_its_grace(tmp_path: Path) -> None:
    """Nothing outlives its grace."""
    part = make_part(tmp_path, STUBBORN)
    await part.start()
    await eventually(lambda: "ready" in part.log_path.read_text())
    await part.stop(0.05)
    assert part.exit_code == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the leash holds on Linux only")
async def test_a_part_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """Even SIGKILL of the parent leaves nothing behind."""
    pid_file = tmp_path / "pid"
    parent_code = f"""
import asyncio, pathlib, sys
from deploy.local.part import Part
async def main():
    part = Part(name="p", command=[sys.executable, "-c", {SLEEP!r}], log_path=pathlib.Path("p.log"))
    await part.start()
    pathlib.Path("pid.new").write_text(str(part.pid))
    pathlib.Path("pid.new").rename("pid")
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        parent_code,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    await eventually(pid_file.exists)
    pid = int(pid_file.read_text())
    assert exists(pid)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not exists(pid))
