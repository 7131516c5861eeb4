"""Which server of a cluster answers for a key; no I/O.

A slot map is what one node said at one moment; a refusal (MOVED) corrects it slot by slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from indexer.contract.functions import Command
from indexer.contract.link.address import Server

KEY_AT: Final = {"FCALL": 3, "FCALL_RO": 3, "EVAL": 3, "EVAL_RO": 3, "MEMORY": 2}
"""Place of the first key in a command, where it is not the first argument."""

KEYLESS: Final = frozenset({"PING", "ECHO", "TIME", "INFO", "CLIENT", "CLUSTER"})
"""Commands that any master answers; FUNCTION goes to every one of them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Servers with the same keys."""

    master: Server
    replicas: tuple[Server, ...] = ()


class SlotMap:
    """Slot -> shard, as far as any is known to serve it.

    Attributes:
        shards: all that are known, by first slot.
        is_whole: whether every slot was served when it was read.
    """

    def __init__(self) -> None:
        self._by_slot: list[Shard | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self.shards: tuple[Shard, ...] = ()
        self.is_whole = False

    @classmethod
    def of(cls, reply: Sequence[Any], asked: Server) -> "SlotMap":
        """Understand what CLUSTER SLOTS returned.

        Args:
            reply: [first slot, last slot, [host, port, ...] of the master, of each replica] each.
            asked: who said so; a node that is given without a host is on the same one.

        Raises:
            ValueError: it is something else.
        """
        slot_map = cls()
        by_slot = slot_map._by_slot
        try:
            for first, last, *servers in sorted(reply, key=lambda entry: int(entry[0])):
                master, *replicas = (
                    Server(host_of((place[0] or b"").decode(), asked), int(place[1]))
                    for place in servers
                )
                by_slot[first : last + 1] = [Shard(master, tuple(replicas))] * (last + 1 - first)
                slot_map._know(by_slot[first])
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"not a map of slots: {error!r}") from error
        if len(by_slot) != REDIS_CLUSTER_HASH_SLOTS:
            raise ValueError("not a map of slots: they are out of range")
        slot_map.is_whole = not any(shard is None for shard in by_slot)
        return slot_map

    def shard(self, slot: int) -> Shard | None:
        """Who answers for a slot."""
        return self._by_slot[slot]

    def move(self, slot: int, master: Server) -> None:
        """Learn from a refusal who answers for a slot."""
        known = next((shard for shard in self.shards if shard.master == master), Shard(master))
        self._by_slot[slot] = known
        self._know(known)

    def _know(self, shard: Shard | None) -> None:
        if shard is not None and shard not in self.shards:
            self.shards += (shard,)


def host_of(said: str, asked: Server) -> str:
    """A node's host as another one names it, which may not know it: then it is its own."""
    return asked.host if said in ("", "?") else said


def slot_of(command: Command) -> int | None:
    """Slot of a command's first key; None when it has none."""
    verb = str(command[0]).upper()
    if verb in KEYLESS:
        return None
    at = KEY_AT.get(verb, 1)
    if at >= len(command):
        return None
    key = command[at]
    return slot_of_key(key if isinstance(key, bytes | str) else repr(key))


def slot_of_key(key: bytes | str) -> int:
    """Slot of a key."""
    return key_slot(key.encode() if isinstance(key, str) else key)
