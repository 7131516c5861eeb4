"""Stands between an engine's event socket and a sidecar, and loses messages when told to."""

import threading

import zmq

POLL_MS = 20
CLOSE_S = 5.0


class Forwarder:
    """Passes every message on as it is, from a thread of its own.

    Args:
        source: the engine's PUB.
        target: address to publish on.
    """

    def __init__(self, source: str, target: str) -> None:
        self._context = zmq.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._from.connect(source)
        self._to = self._context.socket(zmq.PUB)
        self._to.bind(target)
        self._lock = threading.Lock()
        self._to_lose = 0
        self._lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    def lose(self, messages: int) -> None:
        """Lose the next messages, so many; 0 stops losing."""
        with self._lock:
            self._to_lose = messages

    @property
    def lost(self) -> int:
        """Messages lost so far."""
        with self._lock:
            return self._lost

    def close(self) -> None:
        """End the thread and its sockets."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._from.poll(POLL_MS):
                continue
            frames = self._from.recv_multipart()
            with self._lock:
                loses = self._to_lose > 0
                self._to_lose -= loses
                self._lost += loses
            if not loses:
                self._to.send_multipart(frames)
