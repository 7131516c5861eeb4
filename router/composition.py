"""A router of all its parts: what is made, in which order, and how it ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from indexer.contract.link import Link, connected
from indexer.contract.waits import Waits
from router.config import RouterConfig
from router.course import DispatchBounds
from router.door.admission import Admission
from router.door.door import Door
from router.door.key_limits import KeyLimiter
from router.door.reloading import Reloading
from router.http.api import HttpApi
from router.http.client_exchange import BodyLimits
from router.http.cross_origin import CrossOrigin
from router.http.gate import Gate
from router.http.listeners import Listeners
from router.http.operator_calls import OperatorCalls
from router.index.class_watch import ClassWatch
from router.index.held_responses import HeldResponses
from router.index.index_client import IndexClient
from router.index.notice_queue import NoticeQueue
from router.index.redis_guard import RedisGuard
from router.instances.ejections import Ejections
from router.instances.prober import Prober
from router.instances.standing import EjectionRules
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.policies import router_policies
from router.predictions import Predictions
from router.prefill_costs import PrefillCosts
from router.recording.recorder import Recorder, recording
from router.requests.rewriting import Rewriting
from router.route import Router
from router.tokens.hash_chains import HashChains
from router.tokens.tokenize import ModelTokenizers
from router.tracing import Tracer, tracing
from router.unshared_ledger import UnsharedLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The parts of a running router that its owner deals with."""

    admission: Admission
    index: IndexClient
    ledger: Ledger
    listeners: Listeners
    reloading: Reloading
    key_limiter: KeyLimiter
    not_ready_reason: Callable[[], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything between the door and the instances, made from the options."""

    door: Door
    link: Link
    index: IndexClient
    ledger: Ledger
    notices: NoticeQueue
    predictions: Predictions
    chains: HashChains
    tokenizers: ModelTokenizers
    key_limiter: KeyLimiter
    responses: HeldResponses | None
    class_watch: ClassWatch | None
    upstream: Upstream
    ejections: Ejections
    prefill_costs: PrefillCosts
    prober: Prober

    @classmethod
    def of(cls, config: RouterConfig, door: Door, link: Link) -> Self:
        """Nothing is asked or sent yet."""
        guard = RedisGuard(deadline_s=config.index_deadline_s)
        index = IndexClient(link, deadline_s=config.index_deadline_s, guard=guard)
        ledger_kind = Ledger if config.share_reservations else UnsharedLedger
        notices = NoticeQueue(link, deadline_s=config.index_deadline_s)
        chains, kept_s = HashChains(), config.responses_kept_s
        ejections = _ejections(config)
        return cls(
            door=door,
            link=link,
            index=index,
            ledger=ledger_kind(link, deadline_s=config.index_deadline_s, guard=guard),
            notices=notices,
            predictions=Predictions(notices),
            chains=chains,
            tokenizers=_tokenizers(config, door, chains),
            key_limiter=KeyLimiter(link, guard=guard),
            responses=HeldResponses(link, guard=guard, kept_s=kept_s) if kept_s else None,
            class_watch=_class_watch(config, link, index),
            upstream=_upstream(config, door),
            ejections=ejections,
            prefill_costs=PrefillCosts(),
            prober=Prober(ejections, index.instance_ids, door.engine_tls),
        )

    def router(self, config: RouterConfig, recorder: Recorder | None) -> Router:
        """What takes requests through them."""
        return Router(
            admission=self.door.admission,
            key_limiter=self.key_limiter,
            tokenizer=self.tokenizers,
            chains=self.chains,
            index=self.index,
            ledger=self.ledger,
            upstream=self.upstream,
            predictions=self.predictions,
            policies=router_policies(time.monotonic),
            default_policy=config.policy,
            allow_policy_override=config.allow_policy_override,
            allow_instance_choice=config.allow_instance_choice,
            ejections=self.ejections,
            bounds=DispatchBounds(
                retries_max=config.retries_max,
                total_timeout_s=config.total_timeout_s,
                continue_streams=config.continue_streams,
                handover_kept_s=config.handover_kept_s,
            ),
            prefill_costs=self.prefill_costs,
            in_flight_credit=config.in_flight_credit and config.share_reservations,
            responses=self.responses,
            detect_hot_prefixes=config.detect_hot_prefixes,
            aliases=config.model_aliases,
            recorder=recorder,
        )

    def api(
        self, config: RouterConfig, tracer: Tracer | None, recorder: Recorder | None
    ) -> HttpApi:
        """What clients and operators ask."""
        return HttpApi(
            router=self.router(config, recorder),
            index=self.index,
            admission=self.door.admission,
            tokenizers=self.tokenizers,
            predictions=self.predictions,
            ejections=self.ejections,
            prefill_costs=self.prefill_costs,
            class_watch=self.class_watch,
            limits=BodyLimits(
                bytes_max=config.body_bytes_max,
                arrival=Waits(config.body_timeout_s),
                unread=Waits(config.idle_timeout_s),
            ),
            tracer=tracer,
            gate=Gate(keys=self.door.keys, admin=self.door.admin),
            cross_origin=CrossOrigin(config.allowed_origins),
            engine_headers=self.door.engine_headers,
            operator_calls=OperatorCalls(self.door.admission, self.index, self.link),
            rewriting=Rewriting(
                aliases=config.model_aliases,
                inject_usage=config.inject_usage,
                tell_category=config.tell_category,
            ),
        )

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs beside the requests, by name; one that fails ends the process."""
        running = {
            "index": self.index.run(),
            "ledger": self.ledger.run(),
            "notices": self.notices.run(),
            "predictions": self.predictions.run(self.index.completeness),
            "tokenizers": self.tokenizers.run(self.index.models),
            "prober": self.prober.run(),
            "key_limiter": self.key_limiter.run(),
            "reloading": self.door.reloading.run(),
        }
        if self.responses is not None:
            running["responses"] = self.responses.run()
        if self.class_watch is not None:
            running["class_watch"] = self.class_watch.run()
        return running


@asynccontextmanager
async def composed(config: RouterConfig) -> AsyncIterator[Process]:
    """A router that listens, with its background tasks, until the context ends."""
    door = Door.of(config)
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(
            tracing(config.otlp_endpoint, config.otlp_sample_ratio)
        )
        recorder = await stack.enter_async_context(
            recording(config.record_trace, config.record_bytes_max)
        )
        link = await stack.enter_async_context(
            connected(config.redis_url, read_replicas=config.read_replicas)
        )
        parts = Parts.of(config, door, link)
        stack.callback(parts.tokenizers.close)
        await stack.enter_async_context(parts.upstream)
        api = parts.api(config, tracer, recorder)
        listeners = await stack.enter_async_context(
            Listeners(api.public_app(), api.admin_app(), config, door.certificates)
        )
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work, name=name) for name, work in parts.background().items()
            ]
            await listeners.open_shared(api.not_ready_reason)
            yield Process(
                admission=door.admission,
                index=parts.index,
                ledger=parts.ledger,
                listeners=listeners,
                reloading=door.reloading,
                key_limiter=parts.key_limiter,
                not_ready_reason=api.not_ready_reason,
            )
            # Backwards: handlers make the last releases, and the ledger's farewell needs Redis.
            await listeners.close()
            for task in background:
                task.cancel()
            await asyncio.wait(background)


def _tokenizers(config: RouterConfig, door: Door, chains: HashChains) -> ModelTokenizers:
    return ModelTokenizers(
        paths=config.tokenizers,
        threads=config.tokenize_threads,
        deadline_s=config.tokenize_deadline_s,
        waiting_max=config.tokenize_waiting_max,
        cache_bytes_max=config.tokenize_cache_bytes,
        chains=chains,
        open_session=door.engine_session,
    )


def _upstream(config: RouterConfig, door: Door) -> Upstream:
    return Upstream(
        connect_timeout_s=config.connect_timeout_s,
        first_byte_timeout_s=config.first_byte_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        keepalive_s=config.keepalive_s,
        tls=door.engine_tls,
    )


def _ejections(config: RouterConfig) -> Ejections:
    return Ejections(
        EjectionRules(
            failures_min=config.ejection_failures_min,
            lease_s=config.ejection_lease_s,
            lease_max_s=config.ejection_lease_max_s,
            ratio_max=config.ejection_ratio_max,
        )
    )


def _class_watch(config: RouterConfig, link: Link, index: IndexClient) -> ClassWatch | None:
    if not config.detect_hot_prefixes:
        return None
    return ClassWatch(
        link,
        deadline_s=config.index_deadline_s,
        fleets=lambda: [served.fleet for served in index.models().values()],
    )
