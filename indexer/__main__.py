"""`python -m indexer`: sidecar of one engine; `inspect`: what is published; `drain`: empty it."""

import asyncio
import gc
import signal
import sys
from collections.abc import Sequence
from typing import Final

import structlog
import uvloop
import zmq
from prometheus_client import CollectorRegistry, ProcessCollector

from indexer.admin_api import serving
from indexer.approximate.engine_list import DnsList, EngineList, FileList
from indexer.approximate.engines import Drains, Engines
from indexer.config import (
    DrainConfig,
    InspectConfig,
    SidecarConfig,
    host_and_port,
    loggable,
    parse,
)
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.link import connected
from indexer.contract.link.address import without_password
from indexer.draining import Drain
from indexer.engine.engine_api import EngineApi
from indexer.engine.engine_tls import engine_context
from indexer.errors import IndexerError, first
from indexer.sidecar import REDIS_DEADLINE_S, Sidecar
from indexer.telemetry import Telemetry, configure_logging

EXIT_UNCHECKED: Final = 3
"""Of `inspect --check`: neither good nor bad, for Redis did not answer."""

GARBAGE_THRESHOLDS: Final = (50_000, 20, 50)
"""A table has a million long-lived objects: Python's default would walk them again and again."""


def main(argv: Sequence[str]) -> int:
    """Parse, run, exit status."""
    config = parse(argv)
    if isinstance(config, InspectConfig):
        return _inspect(config)
    if isinstance(config, DrainConfig):
        return _drain(config)
    configure_logging(config.log_level)
    log = structlog.get_logger()
    log.info("sidecar_started", **loggable(config))
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    exit_status = 0
    try:
        uvloop.run(_run(config))
    except* asyncio.CancelledError:
        log.info("sidecar_stopped")
    except* (IndexerError, OSError, zmq.ZMQError) as failures:
        log.error("sidecar_failed", error=str(first(failures)))  # noqa: TRY400 - no traceback
        exit_status = 1
    return exit_status


async def _run(config: SidecarConfig) -> None:
    """The composition root of the sidecar; runs until SIGTERM or SIGINT."""
    this = asyncio.current_task()
    assert this is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, this.cancel)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    engine_list, tls = _engine_list(config), engine_context(config)
    drain = Drain(is_draining=config.draining)
    drains = Drains(is_draining=config.draining)
    wishes = drain if engine_list is None else drains
    async with (
        serving(config.metrics_host, int(config.metrics_port), registry, wishes),
        connected(config.redis_url, deadline_s=REDIS_DEADLINE_S) as link,
        EngineApi(config.engine_url, api_key=config.engine_api_key, tls=tls) as api,
    ):
        if engine_list is None:
            await Sidecar(config, api, link, telemetry=Telemetry(registry), drain=drain).run()
        else:
            await Engines(config, engine_list, link, registry=registry, drains=drains).run()


def _engine_list(config: SidecarConfig) -> EngineList | None:
    """Where the list of engines comes from; None for the one engine of `engine_url`."""
    if config.engines_file is not None:
        return FileList(config.engines_file)
    if config.engines_dns is not None:
        place = host_and_port(config.engines_dns)
        assert place is not None, config.engines_dns
        return DnsList(*place)
    return None


def _drain(config: DrainConfig) -> int:
    from indexer.drain import drain  # noqa: PLC0415 - as below

    configure_logging("error")
    return asyncio.run(drain(config))


def _inspect(config: InspectConfig) -> int:
    configure_logging("error")  # what is shown has standard output to itself
    exit_status = 0
    try:
        exit_status = asyncio.run(_show(config))
    except* REDIS_WEATHER as failures:
        sys.stderr.write(f"error: {without_password(config.redis_url)}: {first(failures)}\n")
        exit_status = EXIT_UNCHECKED if config.check else 1
    return exit_status


async def _show(config: InspectConfig) -> int:
    # rich costs the sidecar's start nothing
    from indexer import books_check, inspection  # noqa: PLC0415

    as_json = config.format == "json"
    async with connected(config.redis_url, deadline_s=REDIS_DEADLINE_S) as link:
        if config.check:
            return int(not await books_check.check(link, as_json=as_json))
        await inspection.show(link, as_json=as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
