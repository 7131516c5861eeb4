"""The sidecar's own HTTP: metrics for Prometheus, draining for operators."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from indexer.errors import MetricsUnavailable

BODY_BYTES_MAX: Final = 1024
"""No call has a body that is read."""

SHUTDOWN_DEADLINE_S: Final = 1.0


class Drainable(Protocol):
    """One engine (`Drain`), or all of a process (`Drains`)."""

    def wish(self, *, is_draining: bool) -> None:
        """Drain, or take requests again."""
        ...

    def state(self) -> dict[str, Any]:
        """For operators, as JSON."""
        ...

    def one(self, engine: str) -> "Drainable | None":
        """Of one engine by its host:port; None when there is no such engine."""
        ...


def make_app(registry: CollectorRegistry, drain: Drainable) -> web.Application:
    """GET /metrics, /health, /state; POST /drain, /resume, both without a body, both idempotent.

    Where one process has many engines, `?engine=HOST:PORT` means one of them.
    """

    def meant(request: web.Request) -> Drainable:
        engine = request.query.get("engine")
        found = drain if engine is None else drain.one(engine)
        if found is None:
            raise web.HTTPNotFound(text=f"engine: no {engine} here\n")
        return found

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def state(request: web.Request) -> web.Response:
        return web.json_response(meant(request).state())

    async def begin(request: web.Request) -> web.Response:
        meant(request).wish(is_draining=True)
        return web.json_response(meant(request).state())

    async def resume(request: web.Request) -> web.Response:
        meant(request).wish(is_draining=False)
        return web.json_response(meant(request).state())

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    app.router.add_get("/state", state)
    app.router.add_post("/drain", begin)
    app.router.add_post("/resume", resume)
    return app


@asynccontextmanager
async def serving(
    host: str, port: int, registry: CollectorRegistry, drain: Drainable
) -> AsyncIterator[None]:
    """Listen; not at all where the port is 0.

    Raises:
        MetricsUnavailable: it cannot listen there.
    """
    if not port:
        yield
        return
    app = make_app(registry, drain)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_DEADLINE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise MetricsUnavailable(f"metrics_port: {port} on {host}: {error}") from error
        yield
    finally:
        await runner.cleanup()
