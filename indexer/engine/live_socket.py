"""The engine's live event socket, and what ZMQ tells of its connection."""

from typing import Final

import zmq
import zmq.asyncio
import zmq.utils.monitor

from indexer.engine.ring import open_socket

LIVE_MESSAGES_MAX: Final = 20_000
"""Live batches that may wait in the SUB socket: twice the ring of a publisher with default size."""

FOREIGN: Final[list[bytes]] = []
"""A message of another topic that begins alike."""


class LiveSocket:
    """SUB of one data-parallel rank.

    Attributes:
        is_connected: whether a publisher is there.
    """

    def __init__(
        self, context: zmq.asyncio.Context, *, endpoint: str, bind: bool, topic: str | None
    ) -> None:
        self._socket = open_socket(context, zmq.SUB, LIVE_MESSAGES_MAX)
        self._topic = topic if topic is None else topic.encode()
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic or b"")
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        self.is_connected = False

    def close(self) -> None:
        """Stop following the connection; the context closes the sockets."""
        self._socket.disable_monitor()

    async def has_connected(self) -> bool:
        """Whether a publisher has connected, perhaps again, since this was last asked."""
        has_connected = False
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = await zmq.utils.monitor.recv_monitor_message(self._monitor)
            self.is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            has_connected |= self.is_connected
        return has_connected

    async def next(self, silence_s: float) -> list[bytes] | None:
        """The next message; None after a silence or a change of the connection.

        ZMQ subscribes to prefixes: `kv` brings the messages of `kv-2` as well; those are FOREIGN.
        """
        try:
            frames = await self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            await self._poller.poll(silence_s * 1000)
            try:
                frames = await self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
        return frames if self._topic in (None, frames[0]) else FOREIGN
