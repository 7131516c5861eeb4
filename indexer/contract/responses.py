"""Which instance holds an answer that clients may name: builders of `responses_v1.lua`'s functions.

An engine keeps the answers of `/v1/responses` in its own memory, so a request that names one can be
answered there only. Routers write what they have seen, and any of them reads it.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import xxhash

from indexer.contract import keys
from indexer.contract.call import Call
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.limits import RESPONSES_PER_KEY_MAX, SCHEMA_VERSION

ID_DIGEST_BYTES: Final = 16

_HOLDER: Final = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a response, in digests; see `of`.

    Attributes:
        fleet: of the fleet's id.
        place: of the part of the instance's id that outlives its sidecar: host:port/rank.
    """

    fleet: int
    place: int

    @classmethod
    def of(cls, fleet: FleetId, instance_id: InstanceId) -> Self:
        """An instance as a holder.

        A new sidecar gives its engine a new id, and the engine holds what it held. Of a new engine
        process in the same place nobody has to know: it says itself that it holds nothing.
        """
        return cls(_digest(fleet), _digest(_place(instance_id)))

    def is_in(self, fleet: FleetId) -> bool:
        """Whether it is of this fleet."""
        return self.fleet == _digest(fleet)

    def is_at(self, instance_id: InstanceId) -> bool:
        """Whether this is the instance, or what has taken its place."""
        return self.place == _digest(_place(instance_id))

    def pack(self) -> bytes:
        """16 bytes."""
        return _HOLDER.pack(self.fleet, self.place)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """From `pack`.

        Raises:
            ValueError: these are not 16 bytes.
        """
        if len(packed) != _HOLDER.size:
            raise ValueError(f"no holder of a response: {packed[:32]!r}")
        return cls(*_HOLDER.unpack(packed))


def _place(instance_id: InstanceId) -> str:
    return instance_id.partition("#")[0]


@lru_cache(maxsize=1 << 14)
def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), seed=SCHEMA_VERSION)


def id_digest(response_id: str) -> bytes:
    """16 bytes in place of an id.

    Clients may choose ids; of a digest without a proof against collisions one client could make
    ids that lead others astray.
    """
    text = response_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=ID_DIGEST_BYTES).digest()


def hold(digest: bytes, holder: Holder, *, kept_s: int) -> Call:
    """Remember who holds a response; returns 1.

    Args:
        digest: from `id_digest`.
        holder: who.
        kept_s: for how long.
    """
    assert len(digest) == ID_DIGEST_BYTES, digest
    args = (digest, holder.pack(), kept_s, RESPONSES_PER_KEY_MAX)
    return Call("ts1_response_hold", (keys.responses(digest),), args)


def find(digest: bytes) -> Call:
    """Ask who holds a response; returns what `Holder.unpack` takes, or nil.

    Not told to be read-only: a replica may not have heard of it yet.
    """
    return Call("ts1_response_holder", (keys.responses(digest),), (digest,))
