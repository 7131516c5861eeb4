"""The policy lab's processes and the command that started them."""

import os
import signal
import sys
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from pathlib import Path

import pytest
from waiting import until

pytestmark = pytest.mark.integration

SCENARIO = """
policies = ["lmetric"]
loads = [1.0]

[[workloads]]
name = "mix"
generate = "chat_mix"
stretch = "time"
duration_s = 100
capacity_rps = 100.0
"""


def descendants(pid: int) -> list[int]:
    """Processes that it has started, and theirs."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether it is there, and not just waiting to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
async def test_processes_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to tell them; they end all the same, in the middle of a run."""
    scenario = tmp_path / "mix.toml"
    scenario.write_text(SCENARIO)
    command = [
        *(sys.executable, "-m", "loadgen", "simulate", "--processes", "2"),
        *("--scenario", str(scenario), "--output", str(tmp_path / "out")),
    ]
    process = await create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    children: list[int] = []

    def computes() -> bool:
        children[:] = descendants(process.pid)
        return any(_cpu_ticks(child) > 2 * os.sysconf("SC_CLK_TCK") for child in children)

    try:
        await until(computes, "a process runs a cell", 40)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until(lambda: not any(map(is_running, children)), "they have ended", 10)


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
