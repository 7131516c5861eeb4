"""Every failure as an answer: one table from reason to status, in the words of the API asked."""

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from router import headers as names
from router import telemetry
from router.errors import (
    DropReason,
    RequestInvalid,
    RouterError,
    Unauthorized,
    UpstreamFailed,
)
from router.http.dialects import error_body
from router.requests.received import request_id

log = structlog.get_logger()


STATUS: Final[Mapping[DropReason, int]] = {
    DropReason.REQUEST_INVALID: 400,
    DropReason.PROMPT_TOO_LONG: 400,
    DropReason.UNAUTHORIZED: 401,
    DropReason.FORBIDDEN: 403,
    DropReason.MODEL_UNKNOWN: 404,
    DropReason.INSTANCE_UNKNOWN: 404,
    DropReason.RESERVATION_UNKNOWN: 404,
    DropReason.BODY_TOO_SLOW: 408,
    DropReason.BODY_TOO_LARGE: 413,
    DropReason.OVERLOADED: 429,
    DropReason.KEY_LIMITED: 429,
    DropReason.CLIENT_GONE: 499,
    DropReason.UPSTREAM_FAILED: 502,
    DropReason.DRAINING: 503,
    DropReason.QUEUE_TIMEOUT: 503,
    DropReason.NO_ELIGIBLE_INSTANCE: 503,
    DropReason.INDEX_UNAVAILABLE: 503,
    DropReason.UPSTREAM_TIMEOUT: 504,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Every request has one before its handler sees it."""

CORS_HEADERS: Final = web.RequestKey("cors_headers", Mapping[str, str])
"""CORS headers of every answer to this request; see `cross_origin`."""

DIRECT: Final = web.AppKey("direct", dict[str, Handler])
"""Of an application: what to call for a path, as it stands in the request line, at once.

These are its own handlers, behind its boundary and gate, without aiohttp's search for the route:
most of what a router is asked goes to a few paths, by any method.
"""


def make_app(
    routes: list[web.RouteDef],
    gate: Middleware | None = None,
    *,
    direct: Mapping[str, Handler] = MappingProxyType({}),
) -> web.Application:
    """An application with these routes behind a gate, whose every failure is an answer.

    Args:
        routes: methods, paths and handlers.
        gate: in front of all handlers.
        direct: path -> handler, for all methods; see `DIRECT`.
    """
    routes = [*routes, *(web.route("*", path, handler) for path, handler in direct.items())]
    paths = ", ".join(f"{route.method} {route.path}" for route in routes)

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id, and every failure an answer that says what to change."""
        request[REQUEST_ID] = request_id(request.headers)
        try:
            response = await handler(request)
        except RouterError as error:
            response = _refusal(request.path, error)
        except web.HTTPNotFound:
            message = f"There is no {request.path} here. Served are: {paths}."
            response = _error(request.path, 404, message, "path-unknown")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} is not allowed on {request.path}: use {allowed}."
            response = _error(
                request.path, 405, message, "method-not-allowed", headers={"Allow": allowed}
            )
        except Exception:
            telemetry.INTERNAL_ERRORS.inc()
            log.exception("request_crashed", request_id=request[REQUEST_ID])
            response = _error(
                request.path, 500, "The router failed. This is a defect of it.", "internal-error"
            )
        if not response.prepared:
            response.headers[names.REQUEST_ID] = request[REQUEST_ID]
            set_cors_headers(response, request)
        return response

    app = web.Application(middlewares=[boundary, *([gate] if gate else [])])
    app.add_routes(routes)
    guarded: dict[str, Handler] = {
        path: partial(boundary, handler=partial(gate, handler=handler) if gate else handler)
        for path, handler in direct.items()
    }
    app[DIRECT] = guarded
    return app


def set_cors_headers(response: web.StreamResponse, request: web.Request) -> None:
    """Those of this router in place of an engine's; the engine's, where this router has none."""
    own, headers = request.get(CORS_HEADERS), response.headers
    if not own:
        return
    for name in {one for one in headers if one.lower().startswith("access-control-allow-")}:
        headers.popall(name, None)
    for name, value in own.items():
        headers.add(name, value)


def _refusal(path: str, error: RouterError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = f'{error.challenge} realm="timestable"'
    if isinstance(error, UpstreamFailed):
        headers[names.INSTANCE] = error.instance_id
    param = error.param if isinstance(error, RequestInvalid) else None
    response = _error(
        path, STATUS[error.reason], str(error), error.reason, param=param, headers=headers
    )
    if error.reason is DropReason.DRAINING:
        response.force_close()
    return response


def _error(
    path: str,
    status: int,
    message: str,
    reason: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    return web.json_response(
        error_body(path, status, message, reason, param=param),
        status=status,
        headers={**(headers or {}), names.REASON: reason},
    )
