"""Every failure as an answer: one table from reason to status, one shape, OpenAI's."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import structlog
from aiohttp import web

from router import headers as names
from router import telemetry
from router.errors import DropReason, RequestInvalid, RouterError, UpstreamFailed
from router.requests.openai_request import request_id

log = structlog.get_logger()


STATUS: Final[Mapping[DropReason, int]] = {
    DropReason.REQUEST_INVALID: 400,
    DropReason.PROMPT_TOO_LONG: 400,
    DropReason.MODEL_UNKNOWN: 404,
    DropReason.BODY_TOO_SLOW: 408,
    DropReason.BODY_TOO_LARGE: 413,
    DropReason.OVERLOADED: 429,
    DropReason.CLIENT_GONE: 499,
    DropReason.UPSTREAM_FAILED: 502,
    DropReason.DRAINING: 503,
    DropReason.NO_ELIGIBLE_INSTANCE: 503,
    DropReason.INDEX_UNAVAILABLE: 503,
    DropReason.UPSTREAM_TIMEOUT: 504,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Every request has one before its handler sees it."""

SERVER_ERROR_MIN: Final = 500


def make_app(routes: list[web.RouteDef]) -> web.Application:
    """An application with these routes, whose every failure is an answer."""
    paths = ", ".join(f"{route.method} {route.path}" for route in routes)

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id, and every failure an answer that says what to change."""
        request[REQUEST_ID] = request_id(request.headers)
        try:
            response = await handler(request)
        except RouterError as error:
            response = _refusal(error)
        except web.HTTPNotFound:
            message = f"There is no {request.path} here. Served are: {paths}."
            response = _error(404, message, "path-unknown")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} is not allowed on {request.path}: use {allowed}."
            response = _error(405, message, "method-not-allowed", headers={"Allow": allowed})
        except Exception:
            telemetry.INTERNAL_ERRORS.inc()
            log.exception("request_crashed", request_id=request[REQUEST_ID])
            response = _error(500, "The router failed. This is a defect of it.", "internal-error")
        if not response.prepared:
            response.headers[names.REQUEST_ID] = request[REQUEST_ID]
        return response

    app = web.Application(middlewares=[boundary])
    app.add_routes(routes)
    return app


def _refusal(error: RouterError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    if isinstance(error, UpstreamFailed):
        headers[names.INSTANCE] = error.instance_id
    param = error.param if isinstance(error, RequestInvalid) else None
    response = _error(STATUS[error.reason], str(error), error.reason, param=param, headers=headers)
    if error.reason is DropReason.DRAINING:
        response.force_close()
    return response


def _error(
    status: int,
    message: str,
    reason: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    return web.json_response(
        error_body(message, error_type(status), reason, param),
        status=status,
        headers={**(headers or {}), names.REASON: reason},
    )


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_type(status: int) -> str:
    """OpenAI's name for a class of errors."""
    match status:
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "invalid_request_error" if status < SERVER_ERROR_MIN else "server_error"
