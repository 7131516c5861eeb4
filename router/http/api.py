"""HTTP paths and their handlers. No routing logic."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from prometheus_client import generate_latest

from router import request_record
from router.door.admission import Admission
from router.door.engine_headers import EngineHeaders
from router.door.options import DoorOptions
from router.errors import ModelUnknown, RouterError
from router.http.client_exchange import (
    CANDIDATES_SHOWN_MAX,
    BodyLimits,
    HttpExchange,
    decision_view,
)
from router.http.cross_origin import CrossOrigin
from router.http.dashboard.recent_decisions import RecentDecisions
from router.http.dashboard.routes import Dashboard
from router.http.failures import REQUEST_ID, STATUS, make_app
from router.http.gate import VISITOR, Gate
from router.http.operator_calls import OperatorCalls
from router.http.reservations import Reservations, asked_hold_s
from router.http.websocket import asks_to_switch
from router.index.class_watch import ClassWatch
from router.index.index_client import IndexClient
from router.index.known_fleets import ServedModel
from router.instances.ejections import Ejections
from router.predictions import Predictions
from router.prefill_costs import PrefillCosts
from router.request_record import RequestRecord
from router.requests.endpoints import ENDPOINTS, OTHER, ROUTE, Endpoint, endpoint_of
from router.requests.rewriting import Rewriting
from router.route import Router
from router.tokens.tokenize import ModelTokenizers
from router.tracing import Tracer, trace_id_of

RESERVATIONS: Final = "/admin/reservations"
"""Below the operators' path, as a reservation changes where everybody's requests go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpApi:
    """Handlers of one router process.

    Attributes:
        router: routes completion requests.
        index: models, readiness and the operator's view.
        admission: says whether this router drains.
        tokenizers: say which are still being loaded.
        predictions: how right they were, for the operator's view.
        ejections: whom this router leaves out, for the operator's view.
        prefill_costs: what prefill takes, likewise.
        limits: of request bodies.
        gate: who may ask for what.
        cross_origin: what web pages may ask.
        engine_headers: what engines see of clients' credentials.
        rewriting: what the operator lets be changed in bodies.
        tracer: tells a collector of requests; None without one.
        operator_calls: what operators change.
        recent: the last decisions, for the operator's view.
        class_watch: classes that may be in trouble, likewise; None: nobody looks for them.
        reservations: held for whoever sends requests itself.
    """

    router: Router
    index: IndexClient
    admission: Admission
    tokenizers: ModelTokenizers
    predictions: Predictions
    ejections: Ejections
    prefill_costs: PrefillCosts
    limits: BodyLimits
    gate: Gate = field(default_factory=Gate)
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    engine_headers: EngineHeaders = field(default_factory=lambda: EngineHeaders(DoorOptions()))
    rewriting: Rewriting = field(default_factory=Rewriting)
    tracer: Tracer | None = None
    operator_calls: OperatorCalls
    recent: RecentDecisions = field(default_factory=RecentDecisions)
    class_watch: ClassWatch | None = None
    reservations: Reservations = field(default_factory=Reservations)

    def public_app(self) -> web.Application:
        """Everything clients and operators ask for."""
        return make_app(
            [
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/version", self.version),
                web.post(ROUTE.path, self.explain),
                *self._operator_routes(),
                web.route("*", OTHER.path + "{tail:.+}", self.routed),
            ],
            self.cross_origin.in_front_of(self.gate.middleware(for_clients=True)),
            direct=dict.fromkeys(ENDPOINTS, self.routed),  # which refuses wrong methods itself
        )

    def admin_app(self) -> web.Application:
        """What is asked of exactly this process, behind a port that several share."""
        return make_app(self._operator_routes(), self.gate.middleware(for_clients=False))

    def _operator_routes(self) -> list[web.RouteDef]:
        dashboard = Dashboard(self.recent)
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/fleet", self.fleet),
            *self.operator_calls.routes(),
            web.post(RESERVATIONS, self.reserve),
            web.post(RESERVATIONS + "/{reservation}/prefilled", self.reservations.prefilled),
            web.delete(RESERVATIONS + "/{reservation}", self.reservations.release),
            *dashboard.data_routes(),
            *dashboard.page_routes(),
        ]

    async def routed(self, request: web.Request) -> web.StreamResponse:
        """Route a request to an instance."""
        endpoint = endpoint_of(request.method, request.path, upgrades=asks_to_switch(request))
        if request.method not in endpoint.methods:
            raise web.HTTPMethodNotAllowed(request.method, endpoint.methods)
        record = self._begun(request, endpoint)
        exchange = self._exchange(request, endpoint)
        try:
            await self.router.route(exchange, record)
        except RouterError as error:
            record.status = STATUS[error.reason]
            raise
        except Exception:  # a defect; a second answer on top of a started one would be another
            exchange.abort()
            raise
        finally:
            request_record.tell(record)  # 9 one canonical line
        assert exchange.response is not None
        return exchange.response

    def _begun(self, request: web.Request, endpoint: Endpoint) -> RequestRecord:
        record = _record(request)
        record.endpoint, record.on_decision = endpoint.path, self.recent.add
        caller = request[VISITOR].caller
        record.api_key = None if caller is None else caller.name
        record.trace_id = trace_id_of(request.headers)
        if self.tracer is not None:
            record.trace = self.tracer.begin(request.method, endpoint.path, request.headers)
            record.trace_id = record.trace.trace_id
        return record

    async def reserve(self, request: web.Request) -> web.Response:
        """Answer where a completion request goes that the asker sends itself, and book it there."""
        hold_s = asked_hold_s(request)
        self.reservations.check_room()
        hold = await self.router.hold(self._exchange(request, ROUTE), _record(request))
        kept = {"reservation": self.reservations.keep(hold, hold_s), "hold_s": hold_s}
        rank = hold.decision.instance.data_parallel_rank
        view = decision_view(hold.decision, candidates_max=CANDIDATES_SHOWN_MAX)
        return web.json_response(kept | {"data_parallel_rank": rank} | view)

    async def explain(self, request: web.Request) -> web.Response:
        """Answer where a completion request would go."""
        exchange = self._exchange(request, ROUTE)
        decision = await self.router.explain(exchange, _record(request))
        return web.json_response(decision_view(decision, candidates_max=None))

    def _exchange(self, request: web.Request, endpoint: Endpoint) -> HttpExchange:
        return HttpExchange(
            request,
            endpoint,
            self.limits,
            self.rewriting,
            self.engine_headers,
            last=self.admission.draining,
        )

    async def models(self, request: web.Request) -> web.Response:
        """List the models of all fleets that the caller may use."""
        models = sorted(self._named(request).items())
        return web.json_response(
            {"object": "list", "data": [_model(name, model) for name, model in models]}
        )

    def _named(self, request: web.Request) -> dict[str, ServedModel]:
        """Every name that the client may ask for, aliases of this router included."""
        caller = request[VISITOR].caller
        models = self.index.models()
        aliases = self.rewriting.aliases.items()
        named = {**models, **{name: models[to] for name, to in aliases if to in models}}
        if caller is None:
            return named
        return {name: one for name, one in named.items() if caller.may_use(name)}

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model; its name may hold slashes."""
        name = request.match_info["name"]
        named = self._named(request)
        served = named.get(name)
        if served is None:
            raise ModelUnknown(name, list(named))
        return web.json_response(_model(name, served))

    async def version(self, _: web.Request) -> web.Response:
        """Answer as vLLM does, with the version of most engines; and how many there are of each."""
        everybody = (one for model in self.index.models().values() for one in model.instances)
        instances = {one.instance_id: one.engine_version or "unknown" for one in everybody}
        versions = Counter(instances.values()).most_common()
        version = versions[0][0] if versions else "unknown"
        return web.json_response({"version": version, "engines": dict(versions)})

    async def health(self, _: web.Request) -> web.Response:
        """Answer as long as the process works."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Whether a balancer should send traffic here; degraded it serves, without Redis."""
        reason = self.not_ready_reason()
        if reason is None:
            view: dict[str, Any] = {"status": "ready", "degraded": False}
            if degraded_reason := self.index.degraded_reason():
                view |= {
                    "degraded": True,
                    "reason": degraded_reason,
                    "redis_heard_age_s": round(self.index.heard_age_s(), 3),
                }
            return web.json_response(view)
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    def not_ready_reason(self) -> str | None:
        """Why a balancer should send nothing here; None when it may."""
        if self.admission.draining:
            return "draining"
        if reason := self.index.not_ready_reason():
            return reason
        if loading := self.tokenizers.loading(self.index.models()):
            return f"loading the tokenizer of {', '.join(loading)}"
        return None

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text format."""
        return web.Response(
            body=generate_latest(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def fleet(self, _: web.Request) -> web.Response:
        """Everything in Redis, with names, and how right this router's predictions were."""
        view = await self.index.fleet_view()
        self.predictions.annotate(view)
        self.ejections.annotate(view)
        self.prefill_costs.annotate(view)
        self.tokenizers.annotate(view, self.index.models())
        if self.class_watch is not None:
            self.class_watch.annotate(view)
        if not math.isfinite(view["redis_heard_age_s"]):  # before it was ever heard; JSON has none
            view["redis_heard_age_s"] = None
        view["router"] = {
            "router_id": self.recent.router_id,
            "now_s": time.time(),
            "in_flight": self.admission.requests,
            "queued": self.admission.queued,
            "draining": self.admission.draining,
        }
        return web.json_response(view)


def _record(request: web.Request) -> RequestRecord:
    return RequestRecord(request_id=request[REQUEST_ID], accepted_s=time.monotonic())


def _model(name: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "timestable",
        "root": served.model_root,
        "parent": served.fleet.model_scope if served.adapter is not None else None,
        "max_model_len": served.max_model_len_tokens,
        "instances_count": len(served.instances),
    }
