"""Whether the books balance: reserved against ledgers (`ts1_audit`), and keys that nobody owns."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from indexer.contract import fleet_functions, index_functions, keys
from indexer.contract.call import Call
from indexer.contract.identifiers import FleetId, RouterId
from indexer.contract.limits import RESERVATIONS_PER_AUDIT_MAX
from indexer.contract.link import Link
from indexer.contract.reservations import RESERVATION

KEYS_PER_LOOK_MAX: Final = 256
LEFTOVERS_MAX: Final = 1000
"""Told in one look; more of them say nothing new."""

SEQUENCE_BYTES: Final = 8
NO_EXPIRY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is reserved on a slot beyond (or with minus, short of) what the ledgers say."""

    slot: int
    generation: int
    requests: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The books of a fleet at one moment.

    Attributes:
        differences: of the slots that differ; none when the books balance.
        reservations: in all ledgers.
        routers: registered.
        routers_dead: of them those whose lease is dead; they wait to be reaped.
        clamped_count: how often a counter was kept from falling below zero since the fleet was
            founded; each time something was taken back that was not there.
        looked: there were few enough reservations to compare; without it nothing is known of
            differences.
    """

    differences: tuple[Difference, ...]
    reservations: int
    routers: int
    routers_dead: int
    clamped_count: int
    looked: bool

    @property
    def balances(self) -> bool:
        """Whether nothing differs, and nothing was ever taken back twice."""
        return self.looked and not self.differences and self.clamped_count == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A key that would stay, or says something that nothing stands behind."""

    key: str
    reason: str


def audit(fleet: FleetId) -> Call:
    """Compare what is reserved with all ledgers, if they are not too long; see `audited`."""
    return Call("ts1_audit", _books(fleet), _limits(fleet), read_only=True)


def balance(fleet: FleetId) -> Call:
    """Where they differ, reserve what the ledgers say; returns slots, awaited blocks."""
    return Call("ts1_balance", _books(fleet), _limits(fleet))


def _books(fleet: FleetId) -> tuple[str, str]:
    return keys.counters(fleet), keys.routers(fleet)


def _limits(fleet: FleetId) -> tuple[str, int]:
    return keys.ledger(fleet, RouterId("")), RESERVATIONS_PER_AUDIT_MAX


def audited(reply: Sequence[Any]) -> Audit:
    """Decode what `audit` returned."""
    flat, reservations, routers, dead, clamped, looked = reply
    rows = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    return Audit(
        differences=tuple(
            Difference(slot=slot, generation=generation, requests=requests, prefill_tokens=tokens)
            for slot, generation, requests, tokens in rows
        ),
        reservations=reservations,
        routers=routers,
        routers_dead=dead,
        clamped_count=clamped,
        looked=bool(looked),
    )


async def leftovers(link: Link, fleets: Sequence[FleetId]) -> list[Leftover]:
    """Keys without an expiry, ledgers without a router, awaited blocks without a reservation.

    Of a cluster, the servers are asked that have a part of these fleets. What a call in between has
    set right is left out: each is looked at twice.

    Args:
        link: to Redis.
        fleets: whose servers are scanned, for keys of any fleet; at most LEFTOVERS_MAX are told.

    Raises:
        RedisError, OSError, TimeoutError: as `Link.execute_command`.
    """
    found: list[Leftover] = []
    async for page in _pages(link, fleets):
        suspects = await _look(link, page)
        if suspects:
            names = {one.key for one in suspects}
            again = set(await _look(link, [key for key in page if _name(key) in names]))
            found += [one for one in suspects if one in again]
        if len(found) >= LEFTOVERS_MAX:
            break
    return found[:LEFTOVERS_MAX]


async def _pages(link: Link, fleets: Sequence[FleetId]) -> AsyncIterator[list[bytes]]:
    """All keys of this schema version, server by server."""
    seen: set[str | None] = set()
    for anchor in await _anchors(link, fleets):
        server = link.server_of(anchor)
        if server in seen:
            continue
        seen.add(server)
        page: list[bytes] = []
        async for key in link.scan(anchor, f"{keys.PREFIX}*"):
            page.append(key)
            if len(page) >= KEYS_PER_LOOK_MAX:
                yield page
                page = []
        if page:
            yield page


async def _anchors(link: Link, fleets: Sequence[FleetId]) -> list[str]:
    anchors = [keys.directory()]
    for fleet_id in fleets:
        anchors.append(keys.fleet(fleet_id))
        fleet = await fleet_functions.read_fleet(link, fleet_id)
        if fleet is not None:
            anchors += [index_functions.anchor(fleet, p) for p in range(fleet.partitions)]
    return anchors


async def _look(link: Link, page: Sequence[bytes]) -> list[Leftover]:
    found = []
    lives = await link.execute([("TTL", key) for key in page])
    for key, ttl_s in zip(page, lives, strict=True):
        name = _name(key)
        if ttl_s == NO_EXPIRY:
            found.append(Leftover(key=name, reason="no expiry"))
        tag, _, rest = name.partition("}:")
        if rest.startswith("ledger:"):
            router = rest.removeprefix("ledger:")
            if await link.execute_command("ZSCORE", f"{tag}}}:routers", router) is None:
                found.append(Leftover(key=name, reason="ledger of no registered router"))
        elif rest.startswith("w:") and not await _is_awaited(
            link, key, f"{tag}}}:ledger:".encode(errors="replace")
        ):
            found.append(Leftover(key=name, reason="awaited by no reservation in prefill"))
    return found


def _name(key: bytes) -> str:
    """A key as it is told; anybody may have made one that is no text."""
    return key.decode(errors="backslashreplace")


async def _is_awaited(link: Link, key: bytes, ledgers: bytes) -> bool:
    """Whether everything in an awaited key has its reservation."""
    slot = key.rpartition(b":")[2]
    for field in await link.execute_command("HKEYS", key):
        sequence, router = field[:SEQUENCE_BYTES], field[SEQUENCE_BYTES:]
        value = await link.execute_command("HGET", ledgers + router, sequence)
        if value is None or len(value) <= RESERVATION.size:
            return False
        booked, _, _, state = RESERVATION.unpack(value[: RESERVATION.size])
        if b"%d" % booked != slot or state != 0:
            return False
    return True
