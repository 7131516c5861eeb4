"""One fleet from its founding to its last request: the example to read the contract by."""

import numpy as np
import redis.asyncio
from builders import make_fleet_record, make_instance
from fleets import chain, reserved

from indexer.contract import fleet_functions, functions, index_functions, keys, reservations
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.records import InstanceRecord

PROMPT = list(range(1600))  # 100 blocks of 16 tokens


async def test_a_fleet_from_its_founding_to_its_last_request(
    redis_client: redis.asyncio.Redis,
) -> None:
    """Two instances join, publish, are looked up, reserved, released; one leaves."""

    async def run(call: functions.Call) -> object:
        return await functions.run(redis_client, call)

    # Two sidecars found the fleet and take slots 0 and 1.
    fleet = make_fleet_record()
    assert (
        fleet_functions.fleet_record(fleet.fleet_id, await run(fleet_functions.create(fleet)))
        == fleet
    )
    record = make_instance("a").encode()
    assert await run(fleet_functions.join(fleet.fleet_id, record)) == [0, 1]
    assert await run(fleet_functions.join(fleet.fleet_id, record)) == [1, 1]
    assert InstanceRecord.decode(record) == make_instance("a")
    first, second = SlotIndex(0), SlotIndex(1)
    for slot in (first, second):
        assert await run(index_functions.open_slot(fleet, slot, 1)) == 1

    # The first holds 70 blocks of the prompt, the second 33.
    hashes = chain(fleet, PROMPT)
    assert await run(index_functions.store(fleet, first, 1, hashes[:70])) == 1
    assert await run(index_functions.store(fleet, second, 1, hashes[:33])) == 1

    # A router finds both depths in one lookup, also after evictions.
    async def depths() -> list[int]:
        out = np.zeros(256, np.int64)
        call = index_functions.lookup(fleet, 0, b"".join(hashes))
        index_functions.depths(await functions.run(redis_client, call), out)
        return out[:3].tolist()

    assert await depths() == [70, 33, 0]
    assert await run(index_functions.remove(fleet, first, 1, hashes[69:19:-1])) == 1
    assert await depths() == [20, 33, 0]

    # It books the request where the product is least: (0 + 1072) x 1 beats (0 + 1280) x 1.
    router = RouterId("r1")
    await run(reservations.register(fleet.fleet_id, router, begin=True))
    candidates = np.array([(0, 1, 1280), (1, 1, 1072)], reservations.CANDIDATE)
    status, index, _ = await functions.run(
        redis_client, reservations.reserve(fleet.fleet_id, router, 1, candidates)
    )
    assert (status, index) == (b"ok", 1)
    assert await reserved(redis_client, fleet) == [(0, 0), (1, 1072)]

    # The first token comes, the body ends, and nothing is left.
    assert await run(reservations.prefilled(fleet.fleet_id, router, 1)) == 1
    assert await reserved(redis_client, fleet) == [(0, 0), (1, 0)]
    assert await run(reservations.release(fleet.fleet_id, router, 1)) == 1
    assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]

    # The first sidecar leaves: closed, swept, and its slot is the next one's, a generation on.
    assert await run(fleet_functions.close(fleet.fleet_id, first, 1, -1)) == 1
    assert await run(index_functions.sweep(fleet, first, 1, 0, 2**fleet.bucket_bits)) == 20
    assert await run(fleet_functions.free(fleet.fleet_id, first, 1)) == 1
    assert await run(fleet_functions.join(fleet.fleet_id, record)) == [0, 2]
    assert await redis_client.hlen(keys.instances(fleet.fleet_id)) == 2
