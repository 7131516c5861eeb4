"""CORS: what a browser must be told before it lets a page of another origin ask.

vLLM tells it for any origin by itself; a router, which may have no keys, only for those its
operator names, and never for what is the operators'. Cookies and passwords that a browser keeps are
not let through: pages send their key as any client does. Source: fetch.spec.whatwg.org, "CORS
protocol".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from router import headers as names
from router.http.failures import CORS_HEADERS, Handler
from router.http.gate import is_operators

ANY_ORIGIN: Final = "*"
ALLOW_ORIGIN: Final = "Access-Control-Allow-Origin"

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

_METHODS: Final = "GET, HEAD, POST, PUT, PATCH, DELETE"
_MAX_AGE_S: Final = 600
"""How long a browser need not ask again."""

_EXPOSED_HEADERS: Final = ", ".join(
    (
        *(names.REQUEST_ID, names.REASON, names.INSTANCE, names.PREFILL_INSTANCE, names.DECISION),
        *("retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"),
        *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"),
    )
)


class CrossOrigin:
    """Says what pages of which origins may do.

    Args:
        origins: as browsers write them, https://HOST[:PORT]; `*` is all; empty: none.
    """

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origins)

    def in_front_of(self, gate: Middleware) -> Middleware:
        """A middleware that answers preflights, which bring no key; the rest goes to the gate."""

        @web.middleware
        async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[CORS_HEADERS] = self._headers(request)
            preflight = self._preflight(request)
            return await gate(request, handler) if preflight is None else preflight

        return cross_origin if self._origins else gate

    def _headers(self, request: web.Request) -> Mapping[str, str]:
        """CORS headers of the answer, whoever gives it."""
        origin = request.headers.get("Origin")
        if origin is None or is_operators(request.path):
            return _NO_HEADERS
        if ANY_ORIGIN in self._origins:
            return {ALLOW_ORIGIN: ANY_ORIGIN, "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            ALLOW_ORIGIN: origin,
            "Access-Control-Expose-Headers": _EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def _preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight; None: it is none."""
        allowed = request[CORS_HEADERS]
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or not allowed:
            return None
        if ALLOW_ORIGIN not in allowed:
            return web.Response(status=403)
        request[CORS_HEADERS] = {
            **allowed,
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "*"
            ),
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        return web.Response(status=204)
