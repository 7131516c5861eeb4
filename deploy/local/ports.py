"""Free TCP ports: the ones people expect where possible, the next free ones otherwise."""

import socket
from dataclasses import dataclass, field

from deploy.local.errors import NoFreePortError

PORT_MAX = 32_767  # above it Linux takes the source ports of outgoing connections


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


@dataclass(slots=True, kw_only=True)
class PortPicker:
    """Hands out ports that are free and that it has not handed out before.

    Attributes:
        host: address the servers listen on.
        moved: (wanted, given) of every port that was not to be had.
    """

    host: str
    moved: list[tuple[int, int]] = field(default_factory=list)
    _given: set[int] = field(default_factory=set)

    def pick(self, wanted: int) -> int:
        """Return the wanted port or the next one that is free.

        Raises:
            NoFreePortError: there is none.
        """
        if not is_free(self.host, 0):
            raise NoFreePortError(f"host: nothing can listen on `{self.host}` (IPv4)")
        for port in range(wanted, PORT_MAX + 1):
            if port not in self._given and is_free(self.host, port):
                self._given.add(port)
                if port != wanted:
                    self.moved.append((wanted, port))
                return port
        raise NoFreePortError(f"no free port on {self.host} from {wanted} to {PORT_MAX}")
