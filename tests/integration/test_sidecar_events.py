"""From the engine's events to the index: real ZMQ sockets, the embedded server."""

import asyncio
import json
import socket
from pathlib import Path

import msgpack
import pytest
from aiohttp import web
from engine_stand_in import EngineStandIn, EventPublisher, removed, stored
from free_ports import consecutive_ports
from sidecar_run import PROMPT, Probe, metric, running, until_subscribed
from waiting import until, until_equal

from indexer.engine import ring

pytestmark = pytest.mark.integration

GOLDEN = Path(__file__).parents[1] / "golden" / "kv_event_shapes.json"
STORIES = json.loads(GOLDEN.read_text())["stories"]


async def test_live_events_become_leading_blocks(redis_socket: Path, probe: Probe) -> None:
    """Stored blocks are found by content; removed ones end the prefix."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await until_equal([0], probe.depths)
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        await engine.publishers[0].publish(removed([3]))
        await until_equal([2], probe.depths)


@pytest.mark.parametrize("replay_frames", [3, 4])
async def test_late_join_replays_the_ring(
    redis_socket: Path, probe: Probe, replay_frames: int
) -> None:
    """What was published before the sidecar started is in the index, in both replay shapes."""
    engine = EngineStandIn(publishers=[EventPublisher(replay_frames=replay_frames)])
    async with engine:
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await engine.publishers[0].publish(stored([3, 4], PROMPT[32:], parent=2))
        async with running(engine, redis_socket):
            await until_equal([4], probe.depths)


async def test_gap_is_filled_from_the_ring(redis_socket: Path, probe: Probe) -> None:
    """A batch the network lost comes from the replay, before the next one."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await until_equal([1], probe.depths)
        await publisher.publish(stored([2], PROMPT[16:32], parent=1), skip_live=True)
        await publisher.publish(stored([3], PROMPT[32:48], parent=2))
        await until_equal([3], probe.depths)
        assert metric(metrics, "gaps_total") == 0


async def test_silence_is_checked(redis_socket: Path, probe: Probe) -> None:
    """A batch that was lost right before a silence is found without waiting for the next one."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await until_equal([1], probe.depths)
        await publisher.publish(stored([2], PROMPT[16:32], parent=1), skip_live=True)
        await until_equal([2], probe.depths)


async def test_replay_socket_that_never_answers_is_given_up(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live events are followed all the same, and the metrics say that replays are not to be had."""
    monkeypatch.setattr(ring, "REPLAY_SILENCE_S", 0.1)
    engine = EngineStandIn()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        engine.publishers[0].replay_port = mute.getsockname()[1]
        async with engine, running(engine, redis_socket) as metrics:
            await until_subscribed(engine.publishers[0], probe)
            assert metric(metrics, "replay_available") == 0


async def test_lost_history_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """When the ring has wrapped beyond a gap, only what arrived afterwards is credited."""
    engine = EngineStandIn(publishers=[EventPublisher(ring_batches=1)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        await until_equal([4], probe.depths)
        await publisher.publish(removed([4, 3, 2]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await until_equal([1], lambda: probe.depths(range(16)))
        assert await probe.depths() == [0]
        assert metric(metrics, "batches_lost_total") == 1
        await until_equal(0.001, lambda: metric(metrics, "completeness_ratio"))


async def test_without_replay_a_gap_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """No replay socket: a gap costs the instance its index, and the metrics say so."""
    engine = EngineStandIn(publishers=[EventPublisher(has_replay=False)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await until_subscribed(publisher, probe)
        await publisher.publish(removed([77]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await until_equal([1], lambda: probe.depths(range(16)))
        assert await probe.depths() == [0]
        assert metric(metrics, "replay_available") == 0


async def test_restarted_engine_is_another_instance(redis_socket: Path, probe: Probe) -> None:
    """A new process under the same ports gets a new instance; the old one's blocks are gone."""
    first = EngineStandIn()
    before: set[str] = set()

    async def is_another() -> bool:
        after = {record.instance_id for record in await probe.instances()}
        return len(after) == 1 and not after & before

    async with first:
        ports = (first.publishers[0].port, first.publishers[0].replay_port)
        async with running(first, redis_socket):
            await first.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await until_equal([4], probe.depths)
            before |= {record.instance_id for record in await probe.instances()}
            first.publishers[0].close()
            second = EventPublisher(ports=ports)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(second.serve_replays())
                await second.publish(stored([5], range(16)))
                await until(is_another, "a new instance alone")
                await until(lambda: probe.holds(range(16), 1), "the new engine's block")
                assert not await probe.holds(PROMPT, 1)
                serving.cancel()
            second.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_publishers_that_connect(redis_socket: Path, probe: Probe, host: str) -> None:
    """An address at which nothing listens is bound by the sidecar, one for each rank."""
    live, replay = consecutive_ports(2), consecutive_ports(2)
    publishers = [
        EventPublisher(
            rank=rank,
            connect_to=f"tcp://127.0.0.1:{live + rank}",
            ports=(0, replay + rank),
            topic="",
        )
        for rank in range(2)
    ]
    engine = EngineStandIn(publishers=publishers, tells_sources=False)
    options = {
        "event_endpoint": f"tcp://{host}:{live}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    async with engine, running(engine, redis_socket, **options) as metrics:
        await publishers[1].publish(stored([1, 2, 3, 4], PROMPT))
        await publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await until_equal([2, 4], probe.depths)
        await publishers[0].publish(stored([3], PROMPT[32:48], parent=2))
        await until_equal([3, 4], probe.depths)
        assert metric(metrics, "batches_lost_total") == 0


async def test_topic_is_not_a_prefix(redis_socket: Path, probe: Probe) -> None:
    """Where several emitters share a socket only the one of the engine's very topic counts."""
    engine = EngineStandIn(publishers=[EventPublisher(topic="kv")])
    async with engine, running(engine, redis_socket) as metrics:
        ours = engine.publishers[0]
        await ours.publish(stored([1], PROMPT[:16]))
        await until_equal([1], probe.depths)
        of_another = msgpack.packb([1.5, [stored([1, 2, 3, 4], PROMPT)], 0])
        sequence = ours.sequence.to_bytes(8, "big")
        await ours._pub.send_multipart([b"kv-2", sequence, of_another])
        await ours.publish(stored([2], PROMPT[16:32], parent=1))
        await until_equal([2], probe.depths)
        assert (metric(metrics, "gaps_total"), metric(metrics, "batches_total")) == (0, 2)


async def test_every_shape_reaches_the_index(redis_socket: Path, probe: Probe) -> None:
    """One rank a story of golden bytes: each ends at the depth it may be credited."""
    publishers = [EventPublisher(rank=rank) for rank in range(len(STORIES))]
    engine = EngineStandIn(publishers=publishers)
    async with engine, running(engine, redis_socket):
        for publisher, story in zip(publishers, STORIES, strict=True):
            for step in story["steps"]:
                await publisher.publish_raw(bytes.fromhex(step["payload_hex"]))
        expected = [story["steps"][-1]["depth_blocks"] for story in STORIES]
        await until_equal(expected, probe.depths)


class ForeignEngine(EngineStandIn):
    """An engine of another make: no /metrics, no /version, no /kv_event_sources."""

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(status=404)

    async def _version(self, _: web.Request) -> web.Response:
        return web.Response(status=404)


async def test_engine_of_another_make(redis_socket: Path, probe: Probe) -> None:
    """Options describe an engine that tells nothing; its lease is renewed while it answers."""
    publisher = EventPublisher()
    engine = ForeignEngine(publishers=[publisher], tells_sources=False)
    options = {
        "event_endpoint": f"tcp://*:{publisher.port}",
        "replay_endpoint": f"tcp://*:{publisher.replay_port}",
        "engine_block_size_tokens": 32,
    }
    async with engine, running(engine, redis_socket, **options) as metrics:
        await publisher.publish(stored([1, 2], PROMPT, block_size=32))
        await until_equal([4], probe.depths)
        await until_equal(1, lambda: metric(metrics, "lease_held"))
        (record,) = await probe.instances()
        assert (record.block_size_tokens, record.capacity_blocks) == (32, None)
        assert metric(metrics, "scrape_failures_total") == 0


async def test_unreadable_batches_claim_nothing(redis_socket: Path, probe: Probe) -> None:
    """What may have told of a removal leaves no claim standing; the engine's next use restores it.

    A store that cannot be read costs only itself.
    """
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await until_equal([1], probe.depths)
        await publisher.publish_raw(b"garbage")
        await until_equal([0], probe.depths)
        await publisher.publish({"type": "BlockStored"}, {"type": "Novelty"})
        await publisher.publish(stored([2], PROMPT[16:32], parent=1))
        await until_equal([2], probe.depths)
        await publisher.publish({"type": "BlockStored"})
        await publisher.publish({"type": "BlockRemoved", "block_hashes": "?"})
        await until_equal([0], probe.depths)
        assert metric(metrics, "events_malformed_total") == 4
        assert metric(metrics, "events_unknown_total") == 1
