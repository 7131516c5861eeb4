"""The laws of `table_machine` with a real server's lookups."""

from collections.abc import Sequence

import numpy as np
from builders import make_fleet_record
from contract.embedded_server import EmbeddedServer
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from table_machine import TableMachine

from indexer.contract import index_functions
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX

FLEET = make_fleet_record(bucket_bits=4)


class ServerIndex:
    """An index of its own on the embedded server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._slot = SlotIndex(0)
        server.clear()

    def begin(self) -> None:
        self._slot = SlotIndex(self._slot + 1)
        self._open()

    def flush(self) -> None:
        self._server.clear()
        self._open()

    def _open(self) -> None:
        assert self._server.call(index_functions.open_slot(FLEET, self._slot, 1)) == 1

    def write(self, removed: Sequence[BlockHash], added: Sequence[BlockHash]) -> None:
        if removed:
            assert self._server.call(index_functions.remove(FLEET, self._slot, 1, removed)) == 1
        if added:
            assert self._server.call(index_functions.store(FLEET, self._slot, 1, added)) == 1

    def depth(self, hashes: list[BlockHash]) -> int:
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        reply = self._server.call(index_functions.lookup(FLEET, 0, b"".join(hashes)))
        index_functions.depths(reply, out)
        return int(out[self._slot])


def test_lookups_find_what_the_table_publishes(server: EmbeddedServer) -> None:
    """At every step, through lost writes, flushes and restarts."""
    machine = lambda: TableMachine(ServerIndex(server))  # noqa: E731 - a machine per example
    examples = max(10, settings().max_examples // 5)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
