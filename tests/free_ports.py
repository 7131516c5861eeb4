"""Ports for programs that cannot choose their own."""

import contextlib
import secrets
import socket

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: a server that a test kills must find its
port again when it is started once more."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each with a free one behind it."""
    found: list[int] = []
    rng = secrets.SystemRandom()
    while len(found) < count:
        port = rng.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as beside:
            one.bind(("127.0.0.1", port))
            beside.bind(("127.0.0.1", port + 1))
            if not {port - 1, port, port + 1} & set(found):
                found.append(port)
    return found


def consecutive_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    rng = secrets.SystemRandom()
    while True:
        first = rng.choice(PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
