"""HTTP paths and their handlers. No routing logic."""

import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from router import telemetry
from router.admission import Admission
from router.errors import RouterError
from router.http.client_exchange import BodyLimits, HttpExchange, decision_view
from router.http.failures import REQUEST_ID, STATUS, make_app
from router.index.index_client import IndexClient
from router.index.known_fleets import ServedModel
from router.predictions import Predictions
from router.requests.api_call import Endpoint
from router.route import Router
from router.telemetry import RequestRecord
from router.tokens.tokenize import ModelTokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpApi:
    """Handlers of one router process.

    Attributes:
        router: routes completion requests.
        index: models, readiness and the operator's view.
        admission: says whether this router drains.
        tokenizers: say which are still being loaded.
        predictions: how right they were, for the operator's view.
        limits: of request bodies.
    """

    router: Router
    index: IndexClient
    admission: Admission
    tokenizers: ModelTokenizers
    predictions: Predictions
    limits: BodyLimits

    def public_app(self) -> web.Application:
        """Everything clients and operators ask for."""
        return make_app(
            [
                web.post(Endpoint.CHAT, self.chat),
                web.post(Endpoint.COMPLETIONS, self.completions),
                web.get("/v1/models", self.models),
                web.post("/route", self.explain),
                *self._operator_routes(),
            ]
        )

    def admin_app(self) -> web.Application:
        """What is asked of exactly this process, behind a port that several share."""
        return make_app(self._operator_routes())

    def _operator_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/fleet", self.fleet),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Route a chat completion."""
        return await self._complete(request, Endpoint.CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Route a text completion."""
        return await self._complete(request, Endpoint.COMPLETIONS)

    async def _complete(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        record = _record(request)
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
            telemetry.record(record)  # 9 one canonical line
        assert exchange.response is not None
        return exchange.response

    async def explain(self, request: web.Request) -> web.Response:
        """Answer where a completion request would go."""
        exchange = self._exchange(request, None)
        decision = await self.router.explain(exchange, _record(request))
        return web.json_response(decision_view(decision, candidates_max=None))

    def _exchange(self, request: web.Request, endpoint: Endpoint | None) -> HttpExchange:
        return HttpExchange(request, endpoint, self.limits, last=self.admission.draining)

    async def models(self, _: web.Request) -> web.Response:
        """List the models of all fleets."""
        served = self.index.models().items()
        return web.json_response(
            {"object": "list", "data": [_model(name, model) for name, model in sorted(served)]}
        )

    async def health(self, _: web.Request) -> web.Response:
        """Answer as long as the process works."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Whether a balancer should send traffic here; degraded it serves, without Redis."""
        reason = self._not_ready_reason()
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

    def _not_ready_reason(self) -> str | None:
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
