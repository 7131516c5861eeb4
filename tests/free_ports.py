"""Ports for programs that cannot choose their own."""

import contextlib
import socket


def consecutive_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port: int = first.getsockname()[1]
            for offset in range(1, count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            return port
