"""The HTTP server of the simulated engine, and the life of its process."""

import asyncio
import hmac
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from workers.simulated.answer import dump_json
from workers.simulated.completions import CompletionsApi, ServedModels
from workers.simulated.errors import ApiError, malformed
from workers.simulated.kv_transfer import KvKeeper
from workers.simulated.protocol import Body, pack_ids, parse_generation
from workers.simulated.publisher import EventPublisher
from workers.simulated.request import unpack_tokens
from workers.simulated.runtime import EngineRuntime
from workers.simulated.text import TextModel

VLLM_VERSION = "0.32.0"
BODY_BYTES_MAX = 16 << 20
KEEP_ALIVE_S = 5.0
"""vLLM closes idle connections after this long; a client's pool must be shorter."""

HEADER_BYTES_MAX = 64 << 10
"""For one header or the request line: no less than a proxy in front lets through."""

HEADERS_MAX = 256
"""vLLM's `--h11-max-header-count`."""

BACKLOG = 1024
"""Connections the kernel holds while the event loop is busy; a burst of clients fits."""

SHUTDOWN_LEAST_S = 0.001

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


def json_response(value: object, status: int = HTTPStatus.OK) -> web.Response:
    """A JSON answer."""
    return web.Response(body=dump_json(value), status=status, content_type="application/json")


class EngineServer:
    """Routes of one instance."""

    def __init__(
        self,
        *,
        models: ServedModels,
        text_model: TextModel,
        runtime: EngineRuntime,
        publisher: EventPublisher | None,
        keeper: KvKeeper | None,
        api_key: str | None,
    ) -> None:
        self._models = models
        self._text = text_model
        self._runtime = runtime
        self._publisher = publisher
        self._api_key = api_key.encode() if api_key else None
        self._keeper = keeper
        self._completions = CompletionsApi(
            models=models, text_model=text_model, runtime=runtime, keeper=keeper
        )
        self._created_s = int(time.time())

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._boundary])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._completions.chat),
                web.post("/v1/completions", self._completions.text),
                web.get("/v1/models", self._list_models),
                web.get("/health", self._empty),
                web.get("/ping", self._empty),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/load", self._load),
                web.get("/is_sleeping", self._is_sleeping),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
            ]
        )
        if self._keeper is not None:
            app.add_routes(self._keeper.routes())
            app.on_cleanup.append(self._keeper.close)
        return app

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authentication, and every error in vLLM's JSON shape."""
        if self._api_key is not None and request.path.startswith("/v1"):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(token.encode(), self._api_key)
            if scheme.lower() != "bearer" or not known:
                return json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        try:
            return await handler(request)
        except ApiError as error:
            return json_response(error.body(), error.status)
        except web.HTTPException as error:
            failure = ApiError(HTTPStatus(error.status), _explain(error))
            response = json_response(failure.body(), error.status)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            failure = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error")
            return json_response(failure.body(), failure.status)

    async def _list_models(self, _: web.Request) -> web.Response:
        base, context = self._models.model_name, self._models.max_model_len_tokens
        cards = [self._card(base, root=str(self._text.folder), parent=None, context=context)]
        cards += [
            self._card(name, root=name, parent=base, context=None)
            for name in self._models.adapter_names
        ]
        return json_response({"object": "list", "data": cards})

    def _card(
        self, name: str, *, root: str, parent: str | None, context: int | None
    ) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{secrets.token_hex(16)}",
            "object": "model_permission",
            "created": self._created_s,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": context,
            "permission": [permission],
        }

    async def _empty(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": VLLM_VERSION})

    async def _load(self, _: web.Request) -> web.Response:
        return json_response({"server_load": self._completions.in_flight_count})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return json_response({"is_sleeping": False})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self._runtime.metrics.render(self._runtime.engine)
        return web.Response(
            body=text.encode(),
            headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
        )

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        publisher = self._publisher
        if publisher is None:
            return json_response({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": publisher.buffer_steps,
            "hwm": publisher.high_water_mark,
            "max_queue_size": publisher.high_water_mark,
            "topic": publisher.topic,
        }
        return json_response({"0": source})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = Body(await request.read())
        call = parse_generation(body, chat="messages" in body.fields)
        if "messages" in body.fields:
            token_ids = await self._completions.chat_token_ids(body, call)
        else:
            prompt = body.string("prompt")
            if prompt is None:
                raise malformed("prompt", "Field required")
            token_ids = await self._completions.text_token_ids(prompt, call)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._models.max_model_len_tokens,
                "tokens": token_ids,
                "token_strs": None,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = Body(await request.read())
        token_ids = body.array("tokens")
        if token_ids is None:
            raise malformed("tokens", "Field required")
        packed = pack_ids(token_ids, "tokens", self._text.vocabulary_size) if token_ids else b""
        return json_response({"prompt": self._text.decode(unpack_tokens(packed))})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        if not self._runtime.engine.reset_prefix_cache():
            logger.warning("prefix cache not reset: requests hold blocks")
        return web.Response()


def _explain(error: web.HTTPException) -> str:
    """Aiohttp's text without the status in front of it."""
    return (error.text or error.reason).removeprefix(f"{error.status}: ")


def make_runner(server: EngineServer, *, shutdown_timeout_s: float) -> web.AppRunner:
    """The HTTP side, not listening yet.

    Like vLLM's it decompresses no bodies: one with a content encoding is JSON that does not parse.
    """
    return web.AppRunner(
        server.app(),
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        max_field_size=HEADER_BYTES_MAX,
        max_headers=HEADERS_MAX,
        max_line_size=HEADER_BYTES_MAX,
        # aiohttp waits so long twice, for the handler and for its task; 0 would be for ever.
        shutdown_timeout=max(shutdown_timeout_s / 2, SHUTDOWN_LEAST_S),
        access_log=None,
    )


async def serve(
    *,
    server: EngineServer,
    runtime: EngineRuntime,
    publisher: EventPublisher | None,
    host: str,
    port: int,
    shutdown_timeout_s: float,
) -> None:
    """Run until SIGTERM or SIGINT; then stop accepting, give requests their deadline, leave.

    Raises:
        OSError: the address cannot be bound.
        ExceptionGroup: a background task failed; the process must not live on without it.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = make_runner(server, shutdown_timeout_s=shutdown_timeout_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(runtime.run())]
            if publisher is not None:
                background.append(tasks.create_task(publisher.serve_replays()))
            logger.info("listening on http://%s:%s", host, runner.addresses[0][1])
            await stop.wait()
            logger.info("draining for at most %s s", shutdown_timeout_s)
            await runner.cleanup()
            for task in background:
                task.cancel()
    finally:
        await runner.cleanup()
        if publisher is not None:
            publisher.close()
