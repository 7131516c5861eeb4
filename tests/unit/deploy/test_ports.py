"""Ports are the expected ones where they are free, others otherwise, never one twice."""

import socket
from collections.abc import Iterator

import pytest

from deploy.local.errors import NoFreePortError
from deploy.local.ports import PORT_MAX, PortPicker, is_free

HOST = "127.0.0.1"


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Port of a listening socket, inside the picker's range."""
    port = next(port for port in range(21_000, PORT_MAX) if is_free(HOST, port))
    with socket.create_server((HOST, port)):
        yield port


def test_a_taken_port_moves_up_and_is_told(taken_port: int) -> None:
    """Somebody else's port is left alone, and the move is on record."""
    ports = PortPicker(host=HOST)
    given = ports.pick(taken_port)
    assert (True, [(taken_port, given)]) == (given > taken_port, ports.moved)


def test_no_port_is_given_twice() -> None:
    """Two parts that want one port get two."""
    ports = PortPicker(host=HOST)
    given = [ports.pick(22_000) for _ in range(5)]
    assert len(set(given)) == 5


def test_an_exhausted_range_is_an_error() -> None:
    """Beyond the last port there is nothing to give."""
    ports = PortPicker(host=HOST)
    with pytest.raises(NoFreePortError, match=str(PORT_MAX)):
        [ports.pick(PORT_MAX - 1) for _ in range(3)]


def test_a_host_of_another_machine_is_told_at_once() -> None:
    """A wrong host is not a long search for a free port."""
    ports = PortPicker(host="192.0.2.1")  # RFC 5737: nobody's
    with pytest.raises(NoFreePortError, match=r"host: nothing can listen on `192\.0\.2\.1`"):
        ports.pick(8000)
