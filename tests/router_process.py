"""`python -m router` as a process, as its operator meets it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 90.0
"""Importing alone takes three seconds of a core, which many may share."""


@asynccontextmanager
async def started(*args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, int]]]:
    """A router process and its ports by key; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--port", "0", *args),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    ports: dict[str, int] = {}
    try:
        async with asyncio.timeout(START_S):
            while len(ports) < (2 if "--admin_port" in args else 1):
                line = json.loads(await process.stdout.readline())
                if line["event"] == "listening":
                    ports[line["key"]] = line["port"]
        yield process, ports
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
