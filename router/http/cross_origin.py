"""Web pages as clients: what a browser must be told before it lets a page of another origin ask.

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
from router.http.failures import CORS, Handler
from router.http.gate import is_operators

ANY: Final = "*"
ALLOWED: Final = "Access-Control-Allow-Origin"

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_METHODS: Final = "GET, HEAD, POST, PUT, PATCH, DELETE"
_KEPT_S: Final = 600
"""How long a browser need not ask again."""

_EXPOSED: Final = ", ".join(
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
        """What asks beforehand brings no key, so it is answered in front of the gate."""

        @web.middleware
        async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[CORS] = self._headers(request)
            preflight = self._preflight(request)
            return await gate(request, handler) if preflight is None else preflight

        return cross_origin if self._origins else gate

    def _headers(self, request: web.Request) -> Mapping[str, str]:
        """For the answer, whoever gives it."""
        origin = request.headers.get("Origin")
        if origin is None or is_operators(request.path):
            return _NOTHING
        if ANY in self._origins:
            return {ALLOWED: ANY, "Access-Control-Expose-Headers": _EXPOSED}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            ALLOWED: origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def _preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks beforehand; None: it does not."""
        told = request[CORS]
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or not told:
            return None
        if ALLOWED not in told:
            return web.Response(status=403)
        request[CORS] = {
            **told,
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "*"
            ),
            "Access-Control-Max-Age": str(_KEPT_S),
        }
        return web.Response(status=204)
