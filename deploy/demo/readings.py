"""What engines and routers report about themselves during a run."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

BUSY = "simulated_engine_busy_seconds_total"
LAG = "simulated_engine_lag_seconds_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One engine's own figures at one moment.

    Attributes:
        busy_s: simulated seconds spent computing since its start.
        lag_max_s: how far the engine ever was behind its timetable, in real seconds.
    """

    busy_s: float
    lag_max_s: float


def parse_reading(text: str) -> EngineReading:
    """Read the text of an engine's /metrics.

    Raises:
        KeyError: a metric is missing, so this is no simulated engine.
        ValueError: this is not Prometheus's text format.
    """
    families = text_string_to_metric_families(text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return EngineReading(busy_s=values[BUSY], lag_max_s=values[LAG])


async def read_engines(
    session: aiohttp.ClientSession, urls: Sequence[str]
) -> tuple[EngineReading, ...]:
    """Read every engine, all at once."""

    async def read(url: str) -> EngineReading:
        async with session.get(f"{url}/metrics") as response:
            response.raise_for_status()
            return parse_reading(await response.text())

    return tuple(await asyncio.gather(*map(read, urls)))


@dataclass(slots=True, kw_only=True)
class RouterLogs:
    """Reads the routers' canonical lines as they are appended.

    Attributes:
        paths: one log file per router.
    """

    paths: Sequence[Path]
    _offsets: dict[Path, int] = field(default_factory=dict)

    def added_s(self) -> dict[str, float]:
        """Latency the router added to each request since the last call, by request id.

        Body received to request sent on, plus first upstream byte to first byte out, in real
        seconds. Requests that never got that far are missing.
        """
        added: dict[str, float] = {}
        for path in self.paths:
            with path.open("rb") as log:
                log.seek(self._offsets.get(path, 0))
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            added.update(_added(whole.decode(errors="replace").splitlines()))
        return added


def _added(lines: Iterable[str]) -> dict[str, float]:
    added: dict[str, float] = {}
    for line in lines:
        if '"request_routed"' not in line:
            continue
        fields = json.loads(line)
        parts = fields.get("routing_s"), fields.get("first_byte_added_s")
        if None not in parts:
            added[fields["request_id"]] = sum(parts)
    return added
