"""Composition root of a router process."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import uvloop
from pydantic_core import to_json
from structlog.tracebacks import ExceptionDictTransformer

from indexer.contract.link import connected
from router import telemetry
from router.config import EXIT_USAGE, LogFormat, RouterConfig, loggable, parse_config
from router.dispatch import DispatchBounds
from router.door.admission import Admission
from router.door.api_keys import KeysInvalid
from router.door.certificates import CertificatesUnusable
from router.door.door import Door
from router.door.hash_key import hash_key
from router.door.key_limits import KeyLimiter
from router.door.reloading import Reloading
from router.http.api import HttpApi
from router.http.client_exchange import BodyLimits
from router.http.gate import Gate
from router.http.listeners import Listeners
from router.http.operator_calls import OperatorCalls
from router.index.index_client import IndexClient
from router.index.notice_queue import NoticeQueue
from router.index.redis_guard import RedisGuard
from router.instances.ejections import Ejections
from router.instances.prober import Prober
from router.instances.standing import EjectionRules
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.policies import POLICIES
from router.predictions import Predictions
from router.processes import Supervisor
from router.requests.rewriting import Rewriting
from router.route import Router
from router.tokens.hash_chains import HashChains
from router.tokens.tokenize import ModelTokenizers
from router.tracing import TracesUnavailable, tracing
from router.unshared_ledger import UnsharedLedger

log = structlog.get_logger()


def main(args: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT; exit code 0 after an orderly drain."""
    args = sys.argv[1:] if args is None else args
    if list(args[:1]) == ["hash-key"]:
        return hash_key(sys.stdin, sys.stdout)
    config = parse_config(args)
    set_up_logging(config.log_level, config.log_format)
    try:
        if config.processes > 1:
            return uvloop.run(Supervisor(config, args).run())
        return uvloop.run(serve(config))
    except (KeysInvalid, CertificatesUnusable, TracesUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except Exception:
        log.exception("router_failed")
        return 1


def set_up_logging(level: str, line_format: LogFormat = "json") -> None:
    """Lines on stdout, from this level on: JSON, or text for a person at a terminal."""
    # A frame's locals are headers with credentials, prompts and the password of Redis.
    rendered: list[structlog.typing.Processor] = [
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(serializer=_json_line),
    ]
    if line_format == "console":
        plain = structlog.dev.plain_traceback
        colors = sys.stdout.isatty()
        rendered = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    # Malformed HTTP is answered with a 400; aiohttp would add a traceback of many lines to each.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


def _json_line(event: dict[str, Any], **how: Any) -> str:
    """As `json.dumps` in a third of its time; a number that JSON does not have is null."""
    try:
        return to_json(event, fallback=repr, inf_nan_mode="null").decode()
    except ValueError:  # half a surrogate pair, which UTF-8 does not have
        return json.dumps(event, **how)


async def serve(config: RouterConfig) -> int:
    """Serve until a signal; a background task that fails ends the process with an error."""
    log.info("router_started", **loggable(config))
    signals = _Signals()
    if config.process_number is not None:
        structlog.contextvars.bind_contextvars(process=config.process_number)
        telemetry.PROCESS_RESTARTS.labels(config.process_number).set(config.process_restarts)
        signals.end_with_stdin()
    async with composed(config) as process:
        signals.reload = process.reloading.ask
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
    listeners: Listeners
    reloading: Reloading
    key_limiter: KeyLimiter

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
    door = Door.of(config)
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(
            tracing(config.otlp_endpoint, config.otlp_sample_ratio)
        )
        link = await stack.enter_async_context(
            connected(config.redis_url, read_replicas=config.read_replicas)
        )
        guard = RedisGuard(deadline_s=config.index_deadline_s)
        index = IndexClient(link, deadline_s=config.index_deadline_s, guard=guard)
        ledger_kind = Ledger if config.share_reservations else UnsharedLedger
        ledger = ledger_kind(link, deadline_s=config.index_deadline_s, guard=guard)
        notices = NoticeQueue(link, deadline_s=config.index_deadline_s)
        predictions = Predictions(notices)
        chains = HashChains()
        tokenizers = ModelTokenizers(
            paths=config.tokenizers,
            threads=config.tokenize_threads,
            deadline_s=config.tokenize_deadline_s,
            waiting_max=config.tokenize_waiting_max,
            cache_bytes_max=config.tokenize_cache_bytes,
            chains=chains,
            open_session=door.engine_session,
        )
        stack.callback(tokenizers.close)
        key_limiter = KeyLimiter(link, guard=guard)
        upstream = await stack.enter_async_context(
            Upstream(
                connect_timeout_s=config.connect_timeout_s,
                first_byte_timeout_s=config.first_byte_timeout_s,
                idle_timeout_s=config.idle_timeout_s,
                keepalive_s=config.keepalive_s,
                tls=door.engine_tls,
            )
        )
        ejections = Ejections(
            EjectionRules(
                failures_min=config.ejection_failures_min,
                lease_s=config.ejection_lease_s,
                lease_max_s=config.ejection_lease_max_s,
                ratio_max=config.ejection_ratio_max,
            )
        )
        prober = Prober(ejections, index.instance_ids, door.engine_tls)
        router = Router(
            admission=door.admission,
            key_limiter=key_limiter,
            tokenizer=tokenizers,
            chains=chains,
            index=index,
            ledger=ledger,
            upstream=upstream,
            predictions=predictions,
            policies=POLICIES,
            default_policy=config.policy,
            allow_policy_override=config.allow_policy_override,
            ejections=ejections,
            bounds=DispatchBounds(
                retries_max=config.retries_max,
                total_timeout_s=config.total_timeout_s,
                continue_streams=config.continue_streams,
            ),
            in_flight_credit=config.in_flight_credit and config.share_reservations,
        )
        limits = BodyLimits(
            bytes_max=config.body_bytes_max,
            timeout_s=config.body_timeout_s,
            unread_timeout_s=config.idle_timeout_s,
        )
        api = HttpApi(
            router=router,
            index=index,
            admission=door.admission,
            tokenizers=tokenizers,
            predictions=predictions,
            ejections=ejections,
            limits=limits,
            tracer=tracer,
            gate=Gate(keys=door.keys, admin=door.admin),
            engine_headers=door.engine_headers,
            operator_calls=OperatorCalls(door.admission, index, link),
            rewriting=Rewriting(aliases=config.model_aliases, inject_usage=config.inject_usage),
        )
        listeners = await stack.enter_async_context(
            Listeners(api.public_app(), api.admin_app(), config, door.certificates)
        )
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(index.run(), name="index"),
                tasks.create_task(ledger.run(), name="ledger"),
                tasks.create_task(notices.run(), name="notices"),
                tasks.create_task(predictions.run(index.completeness), name="predictions"),
                tasks.create_task(tokenizers.run(index.models), name="tokenizers"),
                tasks.create_task(prober.run(), name="prober"),
                tasks.create_task(key_limiter.run(), name="key_limiter"),
                tasks.create_task(door.reloading.run(), name="reloading"),
            ]
            await listeners.open_shared(api.not_ready_reason)
            yield Process(
                admission=door.admission,
                index=index,
                ledger=ledger,
                listeners=listeners,
                reloading=door.reloading,
                key_limiter=key_limiter,
            )
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
    """SIGTERM and SIGINT: the first begins the drain, the second cuts it short.

    SIGHUP calls `reload`, which is there as soon as there is something to reload.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)
        self.reload: Callable[[], None] = lambda: None
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        self.reload()

    def end_with_stdin(self) -> None:
        """Its end is as a signal: the supervisor is gone, and nobody else would send one."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if not os.read(0, 1):
                loop.remove_reader(0)
                self.first.set()

        loop.add_reader(0, look)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


if __name__ == "__main__":
    sys.exit(main())
