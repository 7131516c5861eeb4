"""Who may ask for what: keys of clients, the operators' own, and what needs none."""

import base64
import binascii
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from router import headers as names
from router import telemetry
from router.door.api_keys import KeyRing
from router.door.reloading import ApiKeys
from router.door.visitor import Caller, Visitor, header_priority
from router.errors import Forbidden, Unauthorized
from router.http.failures import Handler

VISITOR: Final = web.RequestKey("visitor", Visitor)
"""Every request has one before its handler sees it."""

OPEN_PATHS: Final = ("/health", "/ready", "/dashboard")
"""What says nothing about anybody: two are for probes, and the page is the same for all."""

OPERATOR_PATHS: Final = ("/metrics", "/fleet", "/decisions", "/route", "/admin")
ADMIN_PATH: Final = "/admin"
EXPLAIN_PATH: Final = "/route"
"""Costs what a request costs until it is sent: where operators need no key, a client's is asked."""

_NO_KEY: Final = (
    "This router asks for a key: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`."
)
_UNKNOWN_KEY: Final = "The key of this request is not known here."
_OPERATORS_ONLY: Final = "This path is for operators: it needs the router's admin key."
_NO_PAGES: Final = "This path changes the router, so it takes nothing from web pages."
_NOT_HERE: Final = "This path changes the router: set its admin_key, or ask on its admin_port."


class Gate:
    """Lets requests in, or not.

    Args:
        keys: of clients; None: nobody needs one.
        admin: the operators' key; None: they need none, and paths that change something are not
            served on the port for clients.
    """

    def __init__(self, *, keys: ApiKeys | None = None, admin: KeyRing | None = None) -> None:
        self._keys = keys
        self._admin = admin

    def middleware(self, *, for_clients: bool) -> Middleware:
        """For the application of one port.

        Args:
            for_clients: the port is not for operators alone.
        """

        @web.middleware
        async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[VISITOR] = Visitor(
                caller=self._caller(request, for_clients=for_clients),
                asked_priority=header_priority(request.headers.get(names.PRIORITY)),
            )
            return await handler(request)

        return gate

    def _caller(self, request: web.Request, *, for_clients: bool) -> Caller | None:
        path = request.path
        if _is_below(path, OPEN_PATHS):
            return None
        if _is_below(path, OPERATOR_PATHS):
            self._check_operator(request, for_clients=for_clients)
            if self._admin is not None or not _is_below(path, (EXPLAIN_PATH,)):
                return None
        if self._keys is None or not for_clients:
            return None
        return _found(self._keys.ring, _presented(request, basic=False))

    def _check_operator(self, request: web.Request, *, for_clients: bool) -> None:
        # A browser that knows the key, or reaches the port, sends what any page makes it send.
        if "Origin" in request.headers and _is_below(request.path, (ADMIN_PATH,)):
            telemetry.AUTH_REFUSALS.labels(cause="operator").inc()
            raise Forbidden(_NO_PAGES)
        if self._admin is not None:
            try:
                _found(self._admin, _presented(request, basic=True))
            except Unauthorized as error:
                telemetry.AUTH_REFUSALS.labels(cause="operator").inc()
                raise Unauthorized(_OPERATORS_ONLY, challenge="Basic") from error
        elif for_clients and _is_below(request.path, (ADMIN_PATH,)):
            telemetry.AUTH_REFUSALS.labels(cause="operator").inc()
            raise Forbidden(_NOT_HERE)


def _found(ring: KeyRing, key: str | None) -> Caller:
    if key is None:
        telemetry.AUTH_REFUSALS.labels(cause="no_key").inc()
        raise Unauthorized(_NO_KEY)
    caller = ring.find(key)
    if caller is None:
        telemetry.AUTH_REFUSALS.labels(cause="unknown_key").inc()
        raise Unauthorized(_UNKNOWN_KEY)
    return caller


def _presented(request: web.Request, *, basic: bool) -> str | None:
    """The key that came with a request; of several, nobody can tell which one is meant.

    Args:
        request: the client's.
        basic: also as the password that browsers ask for.
    """
    authorizations = request.headers.getall("Authorization", ())
    own = request.headers.getall("x-api-key", ())
    if len(authorizations) > 1 or len(own) > 1:
        return None
    scheme, _, rest = authorizations[0].partition(" ") if authorizations else ("", "", "")
    match scheme.lower():
        case "bearer":
            key = rest
        case "basic" if basic:
            key = _password(rest)
        case _:
            key = own[0] if own else ""
    return key.strip() or None


def _password(encoded: str) -> str:
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]


def is_operators(path: str) -> bool:
    """Whether a path is the operators' own."""
    return _is_below(path, OPERATOR_PATHS) or _is_below(path, OPEN_PATHS)


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    if not path.startswith(roots):  # hardly any request's does
        return False
    return any(path == root or path.startswith(root + "/") for root in roots)
