"""Paths of the page, of its files, and of the decisions it shows."""

from pathlib import Path
from typing import Any, Final

from aiohttp import web

from router.errors import RequestInvalid
from router.http.dashboard.recent_decisions import SHOWN_MAX, RecentDecisions

_PAGE: Final = Path(__file__).parent / "page"

LIMIT_DIGITS_MAX: Final = 9

_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

_HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, and no way to make markup out of text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """Serves the page and `GET /decisions`.

    The page is the same for everybody and shows nothing by itself: what it asks for, `/fleet` and
    `/decisions`, is what a key protects.

    Args:
        recent: the decisions.
    """

    def __init__(self, recent: RecentDecisions) -> None:
        self._recent = recent
        self._files = {file.name: file.read_bytes() for file in sorted(_PAGE.iterdir())}

    def page_routes(self) -> list[web.RouteDef]:
        """The page and its files; they need no key."""
        return [
            web.get("/dashboard", self.page),
            web.get("/dashboard/", self.page),
            web.get("/dashboard/{file}", self.file),
        ]

    def data_routes(self) -> list[web.RouteDef]:
        """What the page asks for, beside `/fleet`."""
        return [web.get("/decisions", self.decisions)]

    async def page(self, _: web.Request) -> web.Response:
        """The page."""
        return self._answer("index.html")

    async def file(self, request: web.Request) -> web.Response:
        """A file of the page.

        Raises:
            web.HTTPNotFound: there is none of this name.
        """
        name = request.match_info["file"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._answer(name)

    def _answer(self, name: str) -> web.Response:
        return web.Response(
            body=self._files[name],
            headers=_HEADERS,
            content_type=_TYPES[Path(name).suffix],
            charset="utf-8",
        )

    async def decisions(self, request: web.Request) -> web.Response:
        """The last decisions, or with `?request_id=` those of one request, with candidates.

        Raises:
            RequestInvalid: `limit` is no number from 1 to SHOWN_MAX.
        """
        request_id = request.query.get("request_id")
        if request_id is not None:
            return _json(self._recent.of_request(request_id))
        return _json(self._recent.newest(_limit(request.query.get("limit"))))


def _limit(text: str | None) -> int:
    if text is None:
        return SHOWN_MAX
    digits = text.isascii() and text.isdigit() and len(text) <= LIMIT_DIGITS_MAX
    if not digits or not 1 <= int(text) <= SHOWN_MAX:
        raise RequestInvalid(f"limit: use a whole number from 1 to {SHOWN_MAX}.", param="limit")
    return int(text)


def _json(view: dict[str, Any]) -> web.Response:
    return web.json_response(view, headers={"Cache-Control": "no-store"})
