"""`python -m indexer` as a process of its own, to be stopped and killed; optionally in a hurry.

Run as a program it is that process: first argument a JSON map of constants to set, as
`{"indexer.checkpoint_keeper:WRITE_EVERY_MIN_S": 0.1}`, then the options of the indexer.
"""

import asyncio
import importlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine_stand_in import EngineStandIn
from waiting import until

ROOT = Path(__file__).parents[1]


class SidecarProcess:
    """A process and the log lines it has written so far.

    Attributes:
        lines: in order, decoded.
    """

    def __init__(self, child: Process) -> None:
        self.child = child
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Collect lines until the process ends."""
        assert self.child.stdout is not None
        while line := await self.child.stdout.readline():
            self.lines.append(json.loads(line))

    def said(self, event: str) -> int:
        """How many lines there are of an event."""
        return Counter(line["event"] for line in self.lines)[event]

    async def until_said(self, event: str, times: int = 1, deadline_s: float = 20.0) -> None:
        """Wait for a line of an event."""
        await until(lambda: self.said(event) >= times, f"{event}: {self.lines}", deadline_s)


@asynccontextmanager
async def sidecar_process(
    engine: EngineStandIn,
    redis_path: Path,
    *,
    constants: Mapping[str, float] | None = None,
    **options: Any,
) -> AsyncIterator[SidecarProcess]:
    """A sidecar of an engine in a process of its own; killed at the end if it still runs."""
    args = {"engine_url": engine.url, "redis_url": f"unix://{redis_path}", "metrics_port": 0}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        json.dumps(constants or {}),
        *(f"--{name}={value}" for name, value in (args | options).items()),
        stdout=PIPE,
    )
    process = SidecarProcess(child)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.read())
        try:
            yield process
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


def _main() -> int:
    sys.path.insert(0, str(ROOT))
    for name, value in json.loads(sys.argv[1]).items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, value)
    main = importlib.import_module("indexer.__main__").main
    return int(main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(_main())
