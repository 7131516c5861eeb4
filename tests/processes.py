"""What the system says of processes (Linux)."""

from pathlib import Path


def children(pid: int) -> set[int]:
    """Processes started by a process that still run."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def exists(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
