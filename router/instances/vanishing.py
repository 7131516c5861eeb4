"""How long the kernel keeps a connection whose other host says nothing at all."""

import contextlib
import socket
from typing import Any, Final

VANISHED_S: Final = 10
"""A host that acknowledges nothing for so long, not even a probe, is gone: one that is cut off
closes no connection, and a long prefill is as silent as it is."""

STALLED_S: Final = 60
"""The same while much is being sent: to the kernel a process that does not read and a host that is
gone are alike as long as bytes wait, and a busy process may read on."""

LARGE_BODY_BYTES: Final = 64 * 1024
"""More may have to wait for the other process to read."""


def watch(connected: socket.socket) -> None:
    """Have the kernel probe a silent host, and end the connection when it is gone."""
    _set(connected, socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
    _set(connected, socket.IPPROTO_TCP, "TCP_KEEPIDLE", VANISHED_S // 2)
    _set(connected, socket.IPPROTO_TCP, "TCP_KEEPINTVL", VANISHED_S // 5)
    bear(connected, large_body=False)


def bear(connected: socket.socket, *, large_body: bool) -> None:
    """Say how long bytes may wait for the other side."""
    silence_s = STALLED_S if large_body else VANISHED_S
    _set(connected, socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", silence_s * 1000)


def _set(connected: socket.socket, level: int, name: str, value: int) -> None:
    option: Any = getattr(socket, name, None)  # not every system has every one
    if option is not None:
        with contextlib.suppress(OSError):  # a kernel that is older than its headers
            connected.setsockopt(level, option, value)
