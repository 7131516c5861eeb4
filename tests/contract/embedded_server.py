"""The embedded server as the contract tests use it: functions loaded, calls sent one by one."""

from pathlib import Path
from typing import Any

import redis

from indexer.contract import fleet_functions, functions, libraries, reservations
from indexer.contract.records import FleetCounters, FleetRecord


class EmbeddedServer:
    """A blocking client, because hypothesis runs its examples outside of an event loop."""

    def __init__(self, socket: Path) -> None:
        self.redis = redis.Redis(unix_socket_path=str(socket))

    def load(self) -> None:
        """Load the functions, as `functions.load`."""
        for name in libraries.PARTS:
            text = libraries.text(name)
            self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", text)

    def call(self, call: functions.Call) -> Any:
        """One function call."""
        return self.redis.execute_command(*call.command())

    def clear(self) -> None:
        """Drop all data, not the functions."""
        self.redis.flushdb()

    def found(self, fleet: FleetRecord) -> None:
        """Nothing but this fleet, and nobody in it."""
        self.clear()
        self.call(fleet_functions.create(fleet))

    def counters(self, fleet: FleetRecord) -> FleetCounters:
        """The counters of a fleet."""
        counters = reservations.fleet_counters(self.call(reservations.read(fleet.fleet_id)))
        assert counters is not None
        return counters
