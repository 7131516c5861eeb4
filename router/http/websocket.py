"""The client's side of a WebSocket: agreed to by the engine, then bytes in both directions."""

from typing import Any, cast

from aiohttp import web

from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import WEBSOCKET


def asks_to_switch(request: web.Request) -> bool:
    """Whether a request asks to go on as a WebSocket."""
    if request.headers.get("Upgrade", "").strip().lower() != WEBSOCKET:
        return False
    options = ",".join(request.headers.getall("Connection", ())).lower().split(",")
    return "upgrade" in (option.strip() for option in options)


class Switching(web.StreamResponse):
    """The engine's consent. What it says next goes straight to the socket."""

    def __init__(self, *, status: int, headers: Any) -> None:
        super().__init__(status=status, headers=headers)
        self.headers["Connection"], self.headers["Upgrade"] = "Upgrade", WEBSOCKET
        self.force_close()  # the connection ends with the WebSocket


def hear(request: web.Request, connection: EngineConnection) -> None:
    """Send on what the client says from here on, and what it has said too early.

    A client is not read while its engine takes no more; one that goes ends its handler.

    Args:
        request: the one that was agreed to.
        connection: to the engine.
    """
    protocol = request.protocol

    def hold(full: bool) -> None:
        if full:
            protocol.pause_reading()
        else:
            protocol.resume_reading()

    connection.on_full(hold)
    protocol.set_parser(cast("Any", _Speech(connection)))


class _Speech:
    """What aiohttp hands the bytes of a connection to that has switched."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Bytes of the client; never the end."""
        self._connection.say(data)
        return False, b""

    def feed_eof(self) -> None:
        """The client has gone, which its handler learns by being cancelled."""
