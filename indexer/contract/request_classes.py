"""Classes of requests by what their prompts begin with: what routers ask of them, and tell. Pure.

A class is all requests whose prompts share a prefix of 1, 2, 4, 8, ... blocks. Redis counts them in
`ts1_reserve`, tells the counts in `ts1_read`, and keeps the state of those that may be in trouble;
what is made of it is the routers' own (`router/detector.py`). See `classes_v1.lua`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from indexer.contract import keys
from indexer.contract.call import Call
from indexer.contract.identifiers import FleetId
from indexer.contract.limits import BLOCK_HASH_BYTES, CLASS_PLACES, CLASS_PREFIXES_MAX

_HEAD: Final = struct.Struct("<dd")
_STANDING: Final = np.dtype([("streak", "<u4"), ("standing", "u1")], align=False)
_VERDICT: Final = struct.Struct("<8sBI")
DETAILS: Final = struct.Struct("<III")
"""depth in blocks, share in millionths, holders"""
STATE: Final = struct.Struct("<IIBd")
"""streak, requests steered away, taken out, told at; DETAILS follow"""

assert (_STANDING.itemsize, _VERDICT.size, STATE.size) == (5, 13, 17), "as in Lua"

Told = Sequence[Any]
"""What `ts1_read` says of classes, see `recent_classes` there; empty when it was not asked."""


NO_PREFIX: Final = b"-"
"""Instead of the prefixes of a prompt without a full block, which is counted all the same."""


class Standing(IntEnum):
    """Of a class, in Redis."""

    QUIET = 0
    WATCHED = 1
    TAKEN_OUT = 2


class Saying(IntEnum):
    """What a router says of a booked request's class; numbers as in the function."""

    WATCHED = 1
    STEERED = 2
    OVER = 3


_PLACES: Final = tuple(b"#%d" % place for place in CLASS_PLACES)
_POOL_NAMES: Final = tuple(xxh3_64_digest(b"pool %d" % pool) for pool in range(1, 16))
PREFIX_BYTES: Final = BLOCK_HASH_BYTES + len(_PLACES[0])
"""Of one prefix as it is sent: its hash, and where it is counted."""

assert {len(place) for place in _PLACES} == {len("#99999")}, "as in Lua"


@lru_cache(maxsize=CLASS_PREFIXES_MAX + 1)
def _ends(count: int) -> tuple[slice, ...]:
    """Where in a chain the blocks are at which the first so many prefixes end."""
    depths = (1 << level for level in range(count))
    return tuple(slice((d - 1) * BLOCK_HASH_BYTES, d * BLOCK_HASH_BYTES) for d in depths)


@dataclass(frozen=True, slots=True)
class ClassPrefixes:
    """The prefixes by which a prompt belongs to classes; none of a prompt without a full block.

    Where a fleet's instances are in pools, all names are the pool's own, and the first prefix is
    the empty one: that counts the pool's requests.

    Attributes:
        packed: of its first 1, 2, 4, 8, ... blocks, shallow first, PREFIX_BYTES each.
        pool: whose requests these are; 0 for a fleet without pools.
    """

    packed: bytes
    pool: int = 0

    @classmethod
    def of(cls, hashes: bytes, pool: int = 0) -> Self:
        """Choose them from a chain of block hashes, from `block_hash.chain`.

        Args:
            hashes: the chain.
            pool: whose requests these are, 1 to 15; 0 for a fleet without pools.
        """
        count = min((len(hashes) // BLOCK_HASH_BYTES).bit_length(), CLASS_PREFIXES_MAX)
        names = [hashes[one] for one in _ends(count)]
        if pool:
            own = _POOL_NAMES[pool - 1]
            names = [own, *(_mixed(name, own) for name in names)]
        packed = b"".join([name + _PLACES[_word(name) % len(_PLACES)] for name in names])
        return cls(packed, pool)

    @property
    def shallowest(self) -> int:
        """Place of the prefix of one block: 1 behind the empty one, else 0."""
        return 1 if self.pool else 0

    def __len__(self) -> int:
        """How many."""
        return len(self.packed) // PREFIX_BYTES

    def name(self, place: int) -> bytes:
        """The hash that names the class of depth 2 ** (place - shallowest)."""
        return self.packed[place * PREFIX_BYTES : place * PREFIX_BYTES + BLOCK_HASH_BYTES]

    @property
    def places(self) -> list[int]:
        """Of the counter of each."""
        ends = range(PREFIX_BYTES, len(self.packed) + 1, PREFIX_BYTES)
        return [int(self.packed[end - 5 : end]) for end in ends]


def _mixed(name: bytes, own: bytes) -> bytes:
    return bytes([one ^ other for one, other in zip(name, own, strict=True)])


def _word(name: bytes) -> int:
    return int.from_bytes(name[:4], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentClasses:
    """What the fleet's recent requests say of one that comes.

    Attributes:
        requests: booked in the last CLASS_WINDOW_S.
        counts: those of them with each of its prefixes, shape (prefixes,); never too low.
        standings: of each of these classes; dtype u1, as `Standing`.
    """

    requests: float
    counts: npt.NDArray[np.float64]
    standings: npt.NDArray[np.uint8]

    def within(self, prefixes: ClassPrefixes) -> Self:
        """Of the pool's requests only, where the prefixes are a pool's: without the empty one."""
        if not prefixes.shallowest:
            return self
        requests = float(self.counts[0])
        return replace(
            self, requests=requests, counts=self.counts[1:], standings=self.standings[1:]
        )

    @classmethod
    def decode(cls, told: Told) -> Self | None:
        """From what `ts1_read` returned of them; None when it was not asked."""
        if not told:
            return None
        weight, current, before, standings = told
        counts = np.array(current) + np.array(before) * float(weight)
        return cls(
            requests=counts.item(0),
            counts=counts[1:],
            standings=(
                np.frombuffer(standings, _STANDING)["standing"]
                if standings
                else np.zeros(len(counts) - 1, np.uint8)
            ),
        )


def encode_recent(
    weight: float,
    current: Sequence[int],
    before: Sequence[int],
    standings: Sequence[tuple[int, int]],
) -> Told:
    """As the function returns them.

    Args:
        weight: how much of the window before still belongs to the last CLASS_WINDOW_S, 0..1.
        current: counts in this window: of all requests, then of each prefix.
        before: likewise in the window before.
        standings: of each prefix: streak, standing; empty where no class is in trouble.
    """
    packed = np.array(standings, _STANDING).tobytes()
    return [b"%.17g" % weight, list(current), list(before), packed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a router has found about the class of one request.

    Attributes:
        name: hash of the prefix that makes the class.
        says: what is to be noted.
        streak_least: so many requests in a row that go to holders take the holders out.
        depth_blocks: of the prefix.
        share: of recent requests, 0..1.
        holders: instances that hold the prefix.
    """

    name: bytes
    says: Saying
    streak_least: int
    depth_blocks: int
    share: float
    holders: int

    def encode(self) -> bytes:
        """As the function takes it."""
        details = DETAILS.pack(self.depth_blocks, round(self.share * 1e6), self.holders)
        return _VERDICT.pack(self.name, self.says, self.streak_least) + details


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """What a reservation tells of the request's classes.

    Attributes:
        prefixes: to be counted.
        verdict: on its class; None: there is nothing to say.
        holder_flags: one byte for each candidate, 1 for holders; b"" without a verdict.
    """

    prefixes: ClassPrefixes
    verdict: Verdict | None = None
    holder_flags: bytes = b""

    def args(self) -> tuple[bytes, bytes, bytes]:
        """The function's arguments."""
        verdict = b"" if self.verdict is None else self.verdict.encode()
        return self.prefixes.packed or NO_PREFIX, verdict, self.holder_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """A class that may be in trouble, as operators see it.

    Attributes:
        name: hash of its prefix.
        depth_blocks: length of that, canonical blocks.
        share: of recent requests, 0..1, when last told.
        holders: instances that hold the prefix, when last told.
        streak: requests in a row that went to holders.
        taken_out: holders are no candidates for it.
        steered_requests: so many were decided without holders.
        told_age_s: since a request of it was booked.
    """

    name: str
    depth_blocks: int
    share: float
    holders: int
    streak: int
    taken_out: bool
    steered_requests: int
    told_age_s: float


def classes(fleet: FleetId) -> Call:
    """The classes that may be in trouble; see `class_states`."""
    return Call("ts1_classes", (keys.counters(fleet),), (), read_only=True)


def class_states(reply: Sequence[Any]) -> tuple[float, list[ClassState]]:
    """Decode what `classes` returned: requests of the last window, and states, largest share first.

    Raises:
        ValueError: a state is not of this schema version.
    """
    head, flat = reply
    try:
        now_s, count = _HEAD.unpack(head)
        found = [_state(n, raw, now_s) for n, raw in zip(flat[::2], flat[1::2], strict=True)]
    except struct.error as error:
        raise ValueError(f"states of classes are malformed: {error}") from None
    return count, sorted(found, key=lambda one: (-one.share, one.depth_blocks, one.name))


def _state(name: bytes, raw: bytes, now_s: float) -> ClassState:
    streak, steered, taken_out, told_s = STATE.unpack_from(raw)
    depth_blocks, share_millionths, holders = DETAILS.unpack_from(raw, STATE.size)
    return ClassState(
        name=name.hex(),
        depth_blocks=depth_blocks,
        share=share_millionths / 1e6,
        holders=holders,
        streak=streak,
        taken_out=bool(taken_out),
        steered_requests=steered,
        told_age_s=max(0.0, now_s - told_s),
    )
