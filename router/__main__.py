"""Composition root of a router process."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import structlog
import uvloop
from aiohttp import web
from structlog.tracebacks import ExceptionDictTransformer

from indexer.contract.link import connected
from router.admission import Admission
from router.config import RouterConfig, loggable, parse_config
from router.http.api import HttpApi
from router.http.client_exchange import BodyLimits
from router.index.index_client import IndexClient
from router.index.notice_queue import NoticeQueue
from router.index.redis_guard import RedisGuard
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.policies import POLICIES
from router.predictions import Predictions
from router.route import Router
from router.tokens.tokenize import ModelTokenizers
from router.unshared_ledger import UnsharedLedger

log = structlog.get_logger()

BACKLOG: Final = 1024
HEADER_BYTES_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 128
LINGER_S: Final = 2.0
"""How long a body that was refused is still read, so that the client sees the answer."""

SHUTDOWN_S: Final = 1.0
"""For connections that are still open after the drain."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT; exit code 0 after an orderly drain."""
    config = parse_config(sys.argv[1:] if args is None else args)
    set_up_logging(config.log_level)
    try:
        return uvloop.run(serve(config))
    except Exception:
        log.exception("router_failed")
        return 1


def set_up_logging(level: str) -> None:
    """JSON lines on stdout, from this level on."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # A frame's locals are headers with credentials, prompts and the password of Redis.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    # Malformed HTTP is answered with a 400; aiohttp would add a traceback of many lines to each.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


async def serve(config: RouterConfig) -> int:
    """Serve until a signal; a background task that fails ends the process with an error."""
    log.info("router_started", **loggable(config))
    signals = _Signals()
    async with composed(config) as process:
        await signals.first.wait()
        await process.drain(signals.second, config.drain_notice_s, config.drain_deadline_s)
    log.info("router_stopped")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The parts of a running router that its owner deals with."""

    admission: Admission
    index: IndexClient
    ledger: Ledger
    listeners: "Listeners"

    async def drain(self, hurry: asyncio.Event, notice_s: float, deadline_s: float) -> None:
        """Not ready first, then no new connections and requests, then the end of what runs.

        Args:
            hurry: cuts both waits short.
            notice_s: for balancers to notice.
            deadline_s: for answers to finish.
        """
        log.info("drain_started", in_flight=self.admission.requests)
        self.admission.announce_drain()
        await _either(asyncio.sleep(notice_s), hurry.wait())
        await self.listeners.stop_accepting()
        await _either(self.admission.drain(deadline_s), hurry.wait())
        log.info("drain_ended", cut_off=self.admission.requests)
        await self.listeners.close()


@asynccontextmanager
async def composed(config: RouterConfig) -> AsyncIterator[Process]:
    """A router that listens, with its background tasks, until the context ends."""
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(
            connected(config.redis_url, read_replicas=config.read_replicas)
        )
        guard = RedisGuard(deadline_s=config.index_deadline_s)
        index = IndexClient(link, deadline_s=config.index_deadline_s, guard=guard)
        ledger_kind = Ledger if config.share_reservations else UnsharedLedger
        ledger = ledger_kind(link, deadline_s=config.index_deadline_s, guard=guard)
        notices = NoticeQueue(link, deadline_s=config.index_deadline_s)
        predictions = Predictions(notices)
        tokenizers = ModelTokenizers(
            paths=config.tokenizers,
            threads=config.tokenize_threads,
            deadline_s=config.tokenize_deadline_s,
        )
        stack.callback(tokenizers.close)
        admission = Admission(
            requests_max=config.in_flight_requests_max, bytes_max=config.in_flight_bytes_max
        )
        upstream = await stack.enter_async_context(
            Upstream(
                connect_timeout_s=config.connect_timeout_s,
                first_byte_timeout_s=config.first_byte_timeout_s,
                idle_timeout_s=config.idle_timeout_s,
                keepalive_s=config.keepalive_s,
            )
        )
        router = Router(
            admission=admission,
            tokenizer=tokenizers,
            index=index,
            ledger=ledger,
            upstream=upstream,
            predictions=predictions,
            policies=POLICIES,
            default_policy=config.policy,
            allow_policy_override=config.allow_policy_override,
            retries_max=config.retries_max,
            in_flight_credit=config.in_flight_credit and config.share_reservations,
        )
        limits = BodyLimits(bytes_max=config.body_bytes_max, timeout_s=config.body_timeout_s)
        api = HttpApi(
            router=router,
            index=index,
            admission=admission,
            tokenizers=tokenizers,
            predictions=predictions,
            limits=limits,
        )
        listeners = await stack.enter_async_context(Listeners(api, config))
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(index.run(), name="index"),
                tasks.create_task(ledger.run(), name="ledger"),
                tasks.create_task(notices.run(), name="notices"),
                tasks.create_task(predictions.run(index.completeness), name="predictions"),
                tasks.create_task(tokenizers.run(index.models), name="tokenizers"),
            ]
            yield Process(admission=admission, index=index, ledger=ledger, listeners=listeners)
            # Backwards: handlers make the last releases, and the ledger's farewell needs Redis.
            await listeners.close()
            for task in background:
                task.cancel()
            await asyncio.wait(background)


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and end the others."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()


class _Signals:
    """SIGTERM and SIGINT: the first begins the drain, the second cuts it short."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class Listeners:
    """The clients' port and, where configured, the operators'. Use as an async context manager."""

    def __init__(self, api: HttpApi, config: RouterConfig) -> None:
        self._config = config
        self._public = _runner(api.public_app())
        self._admin = _runner(api.admin_app())

    async def __aenter__(self) -> Self:
        config = self._config
        await self._listen(self._public, "port", config.port, reuse_port=config.reuse_port)
        if config.admin_port is not None:
            await self._listen(self._admin, "admin_port", config.admin_port, reuse_port=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _listen(
        self, runner: web.AppRunner, key: str, port: int, *, reuse_port: bool
    ) -> None:
        await runner.setup()
        site = web.TCPSite(
            runner, self._config.host, port, backlog=BACKLOG, reuse_port=reuse_port or None
        )
        try:
            await site.start()
        except OSError as error:
            raise SystemExit(
                f"{key}: cannot listen on {self._config.host}:{port}: {error.strerror}"
            ) from error
        log.info("listening", key=key, host=self._config.host, port=runner.addresses[0][1])

    @property
    def port(self) -> int:
        """The clients' port."""
        return int(self._public.addresses[0][1])

    async def stop_accepting(self) -> None:
        """Leave the clients' port, to others if they share it."""
        for site in self._public.sites:
            await site.stop()

    async def close(self) -> None:
        """End all connections."""
        await self._public.cleanup()
        await self._admin.cleanup()


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        lingering_time=LINGER_S,
        max_field_size=HEADER_BYTES_MAX,
        max_headers=HEADERS_MAX,
        max_line_size=HEADER_BYTES_MAX,
        shutdown_timeout=SHUTDOWN_S,
    )


if __name__ == "__main__":
    sys.exit(main())
