"""How a fleet begins: with its record, and without what an earlier one has left."""

import asyncio
import secrets
from dataclasses import replace
from typing import Final

from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.link import Link
from indexer.contract.records import FleetRecord
from indexer.publishing.sweeper import SweeperLease

FOUNDING_POLL_S: Final = 0.02
UNLINK_KEYS_MAX: Final = 1000


async def find_or_found(redis: Link, founding: FleetRecord, lease: SweeperLease) -> FleetRecord:
    """Join a fleet's record, or found the fleet with `founding` and an epoch drawn now.

    The index outlives the record, so a founder first clears away what an
    earlier fleet of the same name has left: its blocks would be credited to the new instances.
    It may have founded that one, too: with the same epoch again, routers would take the instances
    of then for those of now, and a sidecar another's slot for its own.
    """
    founding = replace(founding, epoch=secrets.randbits(64))
    lease.founders += 1
    try:
        while not await redis.execute_command("EXISTS", keys.fleet(founding.fleet_id)):
            if not await lease.hold():
                await asyncio.sleep(FOUNDING_POLL_S)
                continue
            if await redis.execute_command("EXISTS", keys.fleet(founding.fleet_id)):
                break
            for partition in range(founding.partitions):
                await _clear(redis, index_functions.anchor(founding, partition))
            break
        reply = await functions.run(redis, fleet_functions.create(founding))
    finally:
        lease.founders -= 1
    return fleet_functions.fleet_record(founding.fleet_id, reply)


async def _clear(redis: Link, anchor: str) -> None:
    page: list[bytes] = []
    async for key in redis.scan(anchor, keys.partition_pattern(anchor)):
        page.append(key)
        if len(page) >= UNLINK_KEYS_MAX:
            await redis.execute_command("UNLINK", *page)
            page.clear()
    if page:
        await redis.execute_command("UNLINK", *page)
