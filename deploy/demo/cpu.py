"""How busy the processors are: when they are saturated, measured latencies say nothing.

Linux only (/proc/stat); elsewhere there is no figure.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STAT = Path("/proc/stat")
IDLE_FIELDS = (3, 4)  # idle and iowait of a cpu line, proc(5)


def _jiffies(text: str, processors: set[int]) -> tuple[int, int]:
    """Return (busy, all) time of these processors since boot, in clock ticks."""
    busy = total = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in processors:
            ticks = [int(field) for field in fields[:8]]  # guest time is part of user time
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[field] for field in IDLE_FIELDS)
    return busy, total


@dataclass(frozen=True, slots=True)
class CpuMark:
    """Processor time at one moment, of the processors this process may use."""

    busy: int
    total: int

    @classmethod
    def now(cls) -> Self | None:
        """Read the clock; None where there is no /proc/stat."""
        if not STAT.exists():
            return None
        return cls(*_jiffies(STAT.read_text(), set(os.sched_getaffinity(0))))


def busy_ratio(before: CpuMark | None, after: CpuMark | None) -> float | None:
    """Share of the processors' time that anything used in between, 0..1; None when unknown."""
    if before is None or after is None or after.total == before.total:
        return None
    return (after.busy - before.busy) / (after.total - before.total)
