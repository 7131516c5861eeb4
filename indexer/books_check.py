"""`inspect --check`: whether the books of every fleet balance, and every key has an owner."""

import json
from dataclasses import asdict
from typing import Any

from indexer.contract import audit, functions, keys
from indexer.contract.audit import Audit, Leftover
from indexer.contract.fleet_functions import Unreadable, fleet_id, reading
from indexer.contract.limits import RESERVATIONS_PER_AUDIT_MAX
from indexer.contract.link import Link


async def check(redis: Link, *, as_json: bool) -> bool:
    """Print what is wrong; whether nothing is.

    Raises:
        RedisError, OSError, TimeoutError: as `Link.execute_command`.
    """
    fleets: dict[str, Audit] = {}
    unreadable: dict[str, str] = {}
    for member in sorted(await redis.execute_command("SMEMBERS", keys.directory())):
        try:
            with reading():
                fleet = fleet_id(member)
                books = audit.audited(await functions.run(redis, audit.audit(fleet)))
            if books.looked:
                fleets[fleet] = books
            else:
                unreadable[fleet] = (
                    f"{books.reservations} reservations are more than the "
                    f"{RESERVATIONS_PER_AUDIT_MAX} that one call compares; look when fewer "
                    "requests are in flight"
                )
        except Unreadable as error:
            unreadable[repr(member)[2:-1]] = str(error)
    try:
        with reading():
            left = await audit.leftovers(redis, [fleet_id(name.encode()) for name in fleets])
    except Unreadable as error:
        left, unreadable["leftovers"] = [], str(error)
    good = not left and not unreadable and all(books.balances for books in fleets.values())
    if as_json:
        told: dict[str, Any] = {
            "balances": good,
            "fleets": {name: asdict(books) for name, books in fleets.items()},
            "unreadable": unreadable,
            "leftovers": [asdict(one) for one in left],
        }
        text = json.dumps(told, indent=2)
    else:
        text = "\n".join(_lines(fleets, unreadable, left))
    print(text)  # noqa: T201 - this is its output
    return good


def _lines(fleets: dict[str, Audit], unreadable: dict[str, str], left: list[Leftover]) -> list[str]:
    lines = []
    for name, books in fleets.items():
        verdict = "the books balance" if books.balances else "THE BOOKS DO NOT BALANCE"
        lines.append(
            f"Fleet {name}: {verdict}; {books.reservations} reservations of {books.routers} "
            f"routers ({books.routers_dead} with a dead lease), "
            f"{books.clamped_count} taken back twice"
        )
        lines += [
            f"  slot {one.slot}, generation {one.generation}: {one.requests:+d} requests, "
            f"{one.prefill_tokens:+d} prefill tokens reserved beyond the ledgers"
            for one in books.differences
        ]
    lines += [f"Fleet {name}: unreadable: {reason}" for name, reason in unreadable.items()]
    lines += [f"Left over: {one.key}: {one.reason}" for one in left]
    return lines or ["No fleet is published here, and no key is left over."]
