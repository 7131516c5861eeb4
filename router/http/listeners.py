"""The ports on which this router listens."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

import structlog
from aiohttp import hdrs, web

from router.config import RouterConfig
from router.door.certificates import ServerCertificates
from router.http.client_connection import (
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    ClientConnection,
    Connections,
)
from router.http.failures import DIRECT

log = structlog.get_logger()

BACKLOG: Final = 1024
LINGER_S: Final = 2.0
"""How long a body that was refused is still read, so that the client sees the answer."""

SHARED_PORT_WAIT_S: Final = 10.0
SHARED_PORT_POLL_S: Final = 0.05

SHUTDOWN_S: Final = 1.0
"""For answers to reach their clients, once the drain is over."""

SHUTDOWN_POLL_S: Final = 0.01

CANCEL_S: Final = 0.05
"""aiohttp waits so long twice for handlers that are still there, and then cancels them; 0 would be
for ever."""


class Site(web.BaseSite):
    """A TCP port whose connections are `ClientConnection`s."""

    def __init__(
        self,
        runner: web.AppRunner,
        address: tuple[str, int],
        connections: Connections,
        certificates: ServerCertificates | None,
        *,
        keepalive_s: float,
        reuse_port: bool,
    ) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._address = address
        self._connections = connections
        self._tls = None if certificates is None else certificates.context
        self._reuse_port = reuse_port
        self._connection_options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": keepalive_s,
            "lingering_time": LINGER_S,
            "max_field_size": HEADER_BYTES_MAX,
            "max_headers": HEADERS_MAX,
            "max_line_size": HEADER_BYTES_MAX,
        }

    @property
    def name(self) -> str:
        """Its URL, without the port that the system has chosen."""
        host, port = self._address
        return f"{'http' if self._tls is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is not to be had.
        """
        await super().start()
        host, port = self._address
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            host,
            port,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._connections.header_timeout_s,
            backlog=BACKLOG,
            reuse_port=self._reuse_port or None,
        )

    def _connection(self) -> ClientConnection:
        server = self._runner.server
        assert server is not None, "the runner has been set up"
        return ClientConnection(server, connections=self._connections, **self._connection_options)


class Listeners:
    """The clients' port and, where configured, the operators'. Use as an async context manager.

    Entering it opens both; a clients' port that other processes share waits for `open_shared`.

    Args:
        public: answers clients.
        admin: answers operators.
        config: addresses and bounds.
        certificates: of both ports; None for plain HTTP.
    """

    def __init__(
        self,
        public: web.Application,
        admin: web.Application,
        config: RouterConfig,
        certificates: ServerCertificates | None,
    ) -> None:
        self._config = config
        self._certificates = certificates
        self._public = _runner(public)
        self._admin = _runner(admin)
        self._connections: list[Connections] = []

    async def __aenter__(self) -> Self:
        config = self._config
        if not config.reuse_port:
            await self._listen(self._public, "port", config.port, reuse_port=False)
        if config.admin_port is not None:
            await self._listen(self._admin, "admin_port", config.admin_port, reuse_port=False)
        return self

    async def open_shared(self, not_ready_reason: Callable[[], str | None]) -> None:
        """Take part in a shared port once there is nothing against it, at the latest after a while.

        The kernel gives its connections to whoever listens, ready or not: without this a process
        that has just been started would refuse what its siblings can serve.

        Args:
            not_ready_reason: None when this router can serve.
        """
        config = self._config
        if not config.reuse_port:
            return
        try:
            async with asyncio.timeout(SHARED_PORT_WAIT_S):
                while not_ready_reason() is not None:  # noqa: ASYNC110 - of several parts
                    await asyncio.sleep(SHARED_PORT_POLL_S)
        except TimeoutError:  # a fleet that nobody serves yet is said better by an answer
            log.warning("listening_unready", key="port", reason=not_ready_reason())
        await self._listen(self._public, "port", config.port, reuse_port=True)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _listen(
        self, runner: web.AppRunner, key: str, port: int, *, reuse_port: bool
    ) -> None:
        config = self._config
        await runner.setup()
        _shorten(runner)
        connections = Connections(
            port="public" if key == "port" else "admin",
            count_max=config.connections_max,
            header_timeout_s=config.header_timeout_s,
        )
        self._connections.append(connections)
        site = Site(
            runner,
            (config.host, port),
            connections,
            self._certificates,
            keepalive_s=config.client_keepalive_s,
            reuse_port=reuse_port,
        )
        try:
            await site.start()
        except OSError as error:
            raise SystemExit(
                f"{key}: cannot listen on {config.host}:{port}: {error.strerror}"
            ) from error
        log.info(
            "listening",
            key=key,
            host=config.host,
            port=runner.addresses[0][1],
            tls=self._certificates is not None,
        )

    @property
    def port(self) -> int:
        """The clients' port."""
        return int(self._public.addresses[0][1])

    @property
    def admin_port(self) -> int:
        """The operators' port; there must be one."""
        return int(self._admin.addresses[0][1])

    async def stop_accepting(self) -> None:
        """Leave the clients' port, to others if they share it."""
        for site in self._public.sites:
            await site.stop()

    async def sent(self) -> None:
        """Wait until no request is in a connection, and all of every answer is on its way."""
        while any(one.busy for one in self._connections):  # noqa: ASYNC110 - seen by nobody
            await asyncio.sleep(SHUTDOWN_POLL_S)

    async def close(self) -> None:
        """End all connections: idle ones at once, the others when their answers are sent."""
        for site in self._public.sites | self._admin.sites:
            await site.stop()
        await asyncio.sleep(0)  # whoever has just come begins
        for connections in self._connections:
            connections.end()
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await self.sent()
        except TimeoutError:
            log.warning("connections_cut_off", after_s=SHUTDOWN_S)
        await self._public.cleanup()
        await self._admin.cleanup()


def _shorten(runner: web.AppRunner) -> None:
    """Call what an application has for a path at once, see `failures.DIRECT`."""
    server = runner.server
    assert server is not None, "the runner has been set up"
    direct, through_routes = runner.app[DIRECT], server.request_handler

    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        handler = direct.get(request.raw_path)
        other = hdrs.EXPECT in request.headers or request.method == hdrs.METH_CONNECT
        if handler is None or other:
            return through_routes(request)
        assert isinstance(request, web.Request), "an application makes no others"
        return handler(request)

    server.request_handler = handle


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CANCEL_S)
