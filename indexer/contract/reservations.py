"""Reservations and siblings in flight: one builder per function, as in `fleet_functions.py`."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from indexer.contract import keys
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, FleetId, RouterId
from indexer.contract.limits import (
    BLOCK_HASH_BYTES,
    CANDIDATES_PER_RESERVE_MAX,
    DIRECTORY_TTL_S,
    ROUTER_LEASE_TTL_S,
    SIBLING_TTL_S,
)
from indexer.contract.milestones import Milestones
from indexer.contract.records import FleetCounters
from indexer.contract.request_classes import ClassPrefixes, ClassReport, RecentClasses

LEDGER_TTL_S: Final = 2 * DIRECTORY_TTL_S
"""A ledger outlives the counters it has booked on, so it is reaped, never merely forgotten."""

CANDIDATE: Final = np.dtype(
    [("slot", "<u2"), ("generation", "<u4"), ("new_prefill_tokens", "<u4")], align=False
)
CANDIDATE_STATE: Final = np.dtype(
    [("queued_prefill_tokens", "<u4"), ("batch_size", "<u4"), ("new_prefill_tokens", "<u4")]
)
SIBLING: Final = np.dtype([("slot", "<u2"), ("generation", "<u4"), ("tokens", "<u4")], align=False)
RESERVATION: Final = struct.Struct("<HIIB")
"""slot, generation, prefill tokens still queued, state (0 prefill, 1 decode)"""

NO_BLOCK: Final = bytes(BLOCK_HASH_BYTES)

NOT_IN_FLIGHT: Final = ("",) * 8
"""In place of `InFlight.args`."""

NO_CLASSES: Final = ("",) * 3
"""In place of `ClassReport.args`."""

NO_SIBLINGS: Final = ("",) * 3
"""In place of what `read` asks about siblings."""

assert (CANDIDATE.itemsize, SIBLING.itemsize, RESERVATION.size) == (10, 10, 11), "as in Lua"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What a reservation has to know to count what its siblings are about to compute.

    A sibling counts while its ledger has it in prefill, and SIBLING_TTL_S at most: where nobody
    can tell when the prefill of an answer that is not streamed ends, it stays in prefill until the
    answer ends, and should the engine have given its blocks up by then, the credit would be wrong.

    Attributes:
        milestones: of the prompt.
        block_size_tokens: of each candidate's engine; its hits are floored to that.
        expected_tokens: new prefill tokens of each candidate when the choice was made; None: any.
    """

    milestones: Milestones
    block_size_tokens: npt.NDArray[np.int64]
    expected_tokens: npt.NDArray[np.int64] | None = None

    def args(self, fleet: FleetId) -> tuple[bytes | str | int, ...]:
        """The function's arguments."""
        expected = self.expected_tokens
        return (
            keys.ledger(fleet, RouterId("")),
            keys.sibling_prefix(fleet),
            self.milestones.packed,
            self.milestones.prompt_tokens,
            self.block_size_tokens.astype("<u2").tobytes(),
            b"" if expected is None else expected.astype("<u4").tobytes(),
            self.milestones.new_tokens_min,
            round(SIBLING_TTL_S * 1000),
        )


def read(
    fleet: FleetId,
    milestones: Milestones | None = None,
    prefixes: ClassPrefixes | None = None,
) -> Call:
    """The counters of the whole fleet, siblings and classes.

    See `fleet_counters`, `siblings` and `recent_classes`.

    Args:
        fleet: the fleet.
        milestones: of the prompt whose siblings are asked for; None for nobody's.
        prefixes: of the prompt whose classes are asked for; None for none.
    """
    args: tuple[bytes | str, ...] = ()
    if milestones is not None:
        args = (keys.ledger(fleet, RouterId("")), keys.sibling_prefix(fleet), milestones.packed)
    if prefixes is not None:
        args = (*(args or NO_SIBLINGS), prefixes.packed)
    return Call("ts1_read", (keys.counters(fleet),), args, read_only=True)


def fleet_counters(reply: Sequence[Any]) -> FleetCounters | None:
    """Decode the counters of what `read` returned; None when the fleet has none.

    Raises:
        ValueError: the bytes are not counters of this schema version.
    """
    seconds, microseconds, raw, *_ = reply
    if not raw:
        return None
    return FleetCounters.decode(raw, int(seconds) + int(microseconds) / 1e6, reply[5])


def siblings(reply: Sequence[Any]) -> npt.NDArray[np.void]:
    """The siblings of what `read` returned, dtype SIBLING: how deep a slot will soon be."""
    return np.frombuffer(reply[3], SIBLING)


def recent_classes(reply: Sequence[Any]) -> RecentClasses | None:
    """What recent requests say of this one, of what `read` returned; None when not asked for."""
    return RecentClasses.decode(reply[4])


def context_tokens(prompt_tokens: int, new_prefill_tokens: int) -> int:
    """How many tokens each of the last new ones of a prompt attends to, on average."""
    return max(0, prompt_tokens - new_prefill_tokens // 2)


def _books(fleet: FleetId, router: RouterId) -> tuple[str, str, str]:
    return keys.counters(fleet), keys.routers(fleet), keys.ledger(fleet, router)


def register(fleet: FleetId, router: RouterId, *, begin: bool) -> Call:
    """Begin or renew a router's lease."""
    return Call(
        "ts1_register",
        (keys.routers(fleet), keys.ledger(fleet, router)),
        (router, ROUTER_LEASE_TTL_S, LEDGER_TTL_S, int(begin)),
    )


def reserve(
    fleet: FleetId,
    router: RouterId,
    sequence: int,
    candidates: npt.NDArray[np.void],
    *,
    choice: int = -1,
    expected_batch_size: int = -1,
    in_flight: InFlight | None = None,
    slowness: npt.NDArray[np.int64] | None = None,
    classes: ClassReport | None = None,
    prompt_tokens: int = 0,
) -> Call:
    """Choose and book in one step.

    Args:
        fleet: the fleet.
        router: this router's registration.
        sequence: number of the request, unique within the registration.
        candidates: dtype CANDIDATE, equals in order of preference; tokens by the index alone.
        choice: index of the only acceptable candidate; -1 lets the function take the least product.
        expected_batch_size: the choice's batch size when it was made; -1 for any.
        in_flight: for counting siblings in flight; None: they are not.
        slowness: factor of each candidate's product, 1 to 65,535; None: all alike.
        classes: to be counted and noted; None: the request is not.
        prompt_tokens: of the request, for what its new ones attend to; 0: that is not told.
    """
    assert 0 < len(candidates) <= CANDIDATES_PER_RESERVE_MAX, len(candidates)
    args: tuple[bytes | str | int, ...] = (
        *(router, sequence.to_bytes(8, "little"), candidates.tobytes(), choice),
    )
    more = (
        *(NOT_IN_FLIGHT if in_flight is None else in_flight.args(fleet)),
        b"" if slowness is None else slowness.astype("<u2").tobytes(),
        *(NO_CLASSES if classes is None else classes.args()),
        prompt_tokens,
    )
    return Call("ts1_reserve", _books(fleet, router), (*args, expected_batch_size, *more))


def prefilled(fleet: FleetId, router: RouterId, sequence: int) -> Call:
    """The request's prefill has ended."""
    return Call("ts1_prefilled", _books(fleet, router), (router, sequence.to_bytes(8, "little")))


def await_block(fleet: FleetId, router: RouterId, sequence: int, block: BlockHash) -> Call:
    """The request's prefill ends when its instance has stored this block."""
    args = (router, sequence.to_bytes(8, "little"), block, LEDGER_TTL_S)
    return Call("ts1_await", _books(fleet, router), args)


def release(fleet: FleetId, router: RouterId, sequence: int) -> Call:
    """The request has ended."""
    args = (router, sequence.to_bytes(8, "little"), LEDGER_TTL_S)
    return Call("ts1_release", _books(fleet, router), args)


def sync_row(
    sequence: int,
    slot: int,
    generation: int,
    prefill_tokens: int,
    state: int,
    *,
    awaited: BlockHash | None = None,
    context_tokens: int = 0,
) -> bytes:
    """One reservation as `sync` takes it.

    That is sequence, RESERVATION, the awaited block or zeros, its context or zero (not known).
    """
    packed = RESERVATION.pack(slot, generation, prefill_tokens, state)
    context = context_tokens.to_bytes(4, "little")
    return sequence.to_bytes(8, "little") + packed + (awaited or NO_BLOCK) + context


def sync(fleet: FleetId, router: RouterId, reservations: bytes, *, forget_tombstones: bool) -> Call:
    """Make the ledger say what its router says.

    Args:
        fleet: the fleet.
        router: this router's registration.
        reservations: from `sync_row`, concatenated.
        forget_tombstones: drop the marks of releases that came before their reserve.
    """
    args = (router, reservations, LEDGER_TTL_S, int(forget_tombstones))
    return Call("ts1_sync", _books(fleet, router), args)


def reap(fleet: FleetId, router: RouterId | None = None) -> Call:
    """Take back what one router has reserved; None: a router whose lease is dead, if any."""
    prefix = keys.ledger(fleet, RouterId(""))
    return Call("ts1_reap", (keys.counters(fleet), keys.routers(fleet)), (prefix, router or ""))
