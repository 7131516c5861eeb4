"""An engine that tells no events: what routers say it has computed is its part of the index."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from engine_stand_in import EngineStandIn, EventPublisher
from free_ports import free_ports
from prometheus_client import CollectorRegistry, generate_latest
from sidecar_process import sidecar_process
from sidecar_run import FLEET, PROMPT, Probe, chain_of, metric, running
from waiting import until, until_equal

from indexer.approximate import engine_list, engines
from indexer.approximate.engine_list import DnsList, EngineList, FileList
from indexer.approximate.engines import Drains, Engines
from indexer.config import SidecarConfig
from indexer.contract import block_hash, fleet_functions, functions
from indexer.contract.identifiers import SlotIndex
from indexer.contract.link import connected
from indexer.contract.records import Notice, SlotFlag
from indexer.errors import ListUnreadable

pytestmark = pytest.mark.integration

OTHER = list(range(5000, 5064))
TEXT = block_hash.approximate_root(model_scope="m", block_size_tokens=16)


def silent(**fields: object) -> EngineStandIn:
    """An engine without event sockets."""
    return EngineStandIn(tells_sources=False, **fields)


async def computed(probe: Probe, hashes: bytes, *, first_block: int = 0, slot: int = 0) -> None:
    """Tell a sidecar what its engine has computed, as a router does."""
    counters = await probe.counters()
    assert counters is not None
    notice = Notice(
        decided_s=counters.now_s,
        predicted_tokens=0,
        actual_tokens=0,
        hashes=hashes,
        computed=True,
        first_block=first_block,
    )
    generation = int(counters.slots["generation"][slot])
    call = fleet_functions.notice(FLEET, SlotIndex(slot), generation, notice.encode())
    assert await functions.run(probe.redis, call) == 1


async def test_what_was_computed_is_credited_until_others_have_taken_its_place(
    redis_socket: Path, probe: Probe
) -> None:
    """A chain is found, then its continuation; the one used longest ago goes, tail first."""
    engine = silent(capacity_blocks=6)
    async with engine, running(engine, redis_socket, approximate=True) as metrics:
        await until(probe.slots, "a slot")
        (record,) = await probe.instances()
        assert (record.learned, record.capacity_blocks) == (True, 6)
        await computed(probe, chain_of(PROMPT[:48]))
        await until_equal([3], probe.depths)
        await computed(probe, chain_of(PROMPT)[16:], first_block=2)
        await until_equal([4], probe.depths)
        await computed(probe, chain_of(OTHER))
        await until_equal([4], lambda: probe.depths(OTHER))
        assert await probe.depths() == [2]
        await until_equal(6.0, lambda: metric(metrics, "learned_blocks"))
        assert await probe.completeness() == 0.0


async def test_a_new_engine_process_has_computed_nothing(redis_socket: Path, probe: Probe) -> None:
    """Where no start time is told, whoever was away for a moment is another instance."""
    engine = silent()
    async with AsyncExitStack() as process, running_of(engine, process, redis_socket) as metrics:
        await until(probe.slots, "a slot")
        await computed(probe, chain_of(PROMPT))
        await until_equal([4], probe.depths)
        before = (await probe.instances())[0].instance_id
        await process.aclose()
        await until_equal(0.0, lambda: metric(metrics, "lease_held"))
        async with silent(port=engine.port):
            await until(lambda: changed(probe, before), "another instance")
            assert max(await probe.depths()) == 0


async def changed(probe: Probe, before: str) -> bool:
    """Whether the only usable slot is another instance's."""
    usable = [slot for slot, flags in (await probe.slots()).items() if flags == SlotFlag.USED]
    records = await probe.instances()
    return len(usable) == 1 and all(record.instance_id != before for record in records)


@asynccontextmanager
async def running_of(
    engine: EngineStandIn, process: AsyncExitStack, where: Path
) -> AsyncIterator[CollectorRegistry]:
    """A sidecar of an engine that ends when `process` is closed."""
    await process.enter_async_context(engine)
    async with running(engine, where, approximate=True) as metrics:
        yield metrics


async def test_text_chains_stand_beside_an_exact_table(redis_socket: Path, probe: Probe) -> None:
    """The events' own blocks, completeness and resyncs know nothing of them."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await until(probe.slots, "a slot")
        chain = block_hash.chain(TEXT, bytes(range(256)) * 2, 16)
        await computed(probe, chain)
        await until_equal(8.0, lambda: metric(metrics, "learned_blocks"))
        assert metric(metrics, "index_blocks") == 0
        assert await probe.completeness() == 1.0
        await until_equal(8.0, lambda: metric(metrics, "published_blocks_total"))
        publisher = engine.publishers[0]
        await publisher.publish({"type": "AllBlocksCleared"})
        await until_equal(0.0, lambda: metric(metrics, "learned_blocks"))
        assert metric(metrics, "notices_total") == 0


@asynccontextmanager
async def serving(
    engine_list: EngineList, where: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[CollectorRegistry, Drains]]:
    """One process's sidecars of many engines, in a hurry."""
    monkeypatch.setattr(engines, "LIST_EVERY_S", 0.05)
    config = SidecarConfig(redis_url=f"unix://{where}", metrics_port=0)
    registry, drains = CollectorRegistry(), Drains()
    async with connected(config.redis_url) as link, asyncio.TaskGroup() as tasks:
        many = Engines(config, engine_list, link, registry=registry, drains=drains)
        task = tasks.create_task(many.run())
        try:
            yield registry, drains
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_engines_come_and_go_with_the_lines_of_a_file(
    redis_socket: Path, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an instance with blocks of its own; a line that goes takes both with it."""
    path = tmp_path / "engines"
    async with silent() as a, silent() as b:
        path.write_text(f"# two\n{a.url}\n")
        async with serving(FileList(path), redis_socket, monkeypatch) as (registry, drains):
            await until_equal([a.url], lambda: urls(probe))
            path.write_text(f"{a.url}\nnonsense\n{b.url}/\n")
            await until_equal(sorted([a.url, b.url]), lambda: urls(probe))
            await computed(probe, chain_of(PROMPT), slot=1)
            await until_equal([0, 4], probe.depths)

            text = generate_latest(registry).decode()
            mine = f'timestable_indexer_lease_held{{engine="127.0.0.1:{b.port}",rank="0"}} 1.0'
            assert mine in text
            assert text.count("# TYPE timestable_indexer_lease_held ") == 1
            one = drains.one(f"127.0.0.1:{b.port}")
            assert one is not None
            one.wish(is_draining=True)
            drained = SlotFlag.USED | SlotFlag.DRAINING
            await until_equal({0: SlotFlag.USED, 1: drained}, probe.slots)

            path.write_text(f"{a.url}\n")
            await until_equal([a.url], lambda: urls(probe))
            path.unlink()
            await until(lambda: 'list_failures_total{engine=""} 1.0' in page(registry), "failure")
            assert await urls(probe) == [a.url]
        assert await urls(probe) == []
        assert await probe.redis.keys("*:p:*:*") == []


def page(registry: CollectorRegistry) -> str:
    """The metrics as Prometheus reads them."""
    return generate_latest(registry).decode()


async def urls(probe: Probe) -> Sequence[str]:
    """Of the fleet's instances, in order."""
    return sorted(record.url for record in await probe.instances())


async def test_an_engine_that_does_not_fit_concerns_no_other(
    redis_socket: Path, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is not there, or is listed twice; the first is tried again later."""
    path = tmp_path / "engines"
    async with silent() as good, silent(block_size_tokens=24) as odd:
        twice = good.url.replace("http:", "https:")
        path.write_text(f"{odd.url}\nhttp://127.0.0.1:9\n{good.url}\n{twice}\n")
        async with serving(FileList(path), redis_socket, monkeypatch) as (registry, _):
            refused = 'timestable_indexer_engine_failures_total{engine=""} 1.0'
            await until(lambda: refused in page(registry), "a refusal")
            await until_equal([good.url], lambda: urls(probe))


async def test_of_a_long_list_the_first_are_served_and_share_what_may_be_learned(
    redis_socket: Path, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of those that came first shrinks with those that come later."""
    monkeypatch.setattr(engines, "ENGINES_MAX", 2)
    monkeypatch.setattr(engines, "ALL_LEARNED_BLOCKS_MAX", 6)
    path = tmp_path / "engines"
    async with silent() as a, silent() as b:
        path.write_text(f"{a.url}\n")
        async with serving(FileList(path), redis_socket, monkeypatch) as (registry, _):
            await until_equal([a.url], lambda: urls(probe))
            await computed(probe, chain_of(PROMPT))
            await until_equal([4], probe.depths)
            path.write_text(f"{a.url}\n{b.url}\nhttp://127.0.0.1:9\n")
            await until_equal([3, 0], probe.depths)
            assert 'timestable_indexer_engines{engine=""} 2.0' in page(registry)


async def test_a_process_of_its_own_serves_all_engines_of_a_file(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """With one page of metrics and a drain for each engine; on SIGTERM all of them leave."""
    path = tmp_path / "engines"
    (port,) = free_ports(1)
    async with silent() as a, silent() as b:
        path.write_text(f"{a.url}\n{b.url}\n")
        options = {"engines_file": path, "metrics_port": port, "metrics_host": "127.0.0.1"}
        async with (
            sidecar_process(a, redis_socket, **options) as process,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            await process.until_said("lease_renewed", 2, deadline_s=40)
            assert await urls(probe) == sorted([a.url, b.url])
            for engine, status in ((f"127.0.0.1:{b.port}", 200), ("nobody:1", 404)):
                async with http.post("/drain", params={"engine": engine}) as answer:
                    assert answer.status == status
            flags = [SlotFlag.USED, SlotFlag.USED | SlotFlag.DRAINING]
            await until_equal(flags, lambda: sorted_flags(probe))
            async with http.get("/metrics") as answer:
                text = await answer.text()
            assert 'timestable_indexer_engines{engine=""} 2.0' in text
            assert (
                f'timestable_indexer_draining{{engine="127.0.0.1:{b.port}",rank="0"}} 1.0' in text
            )
            process.child.terminate()
            assert await process.child.wait() == 0
        assert await urls(probe) == []


async def sorted_flags(probe: Probe) -> list[int]:
    """Of the used slots."""
    return sorted((await probe.slots()).values())


async def test_engines_are_found_by_name(
    redis_socket: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine at each address; the resolver is the machine's own."""
    async with silent(publishers=[EventPublisher()]) as engine:
        where = DnsList("localhost", engine.port)
        async with serving(where, redis_socket, monkeypatch):
            await until_equal([engine.url], lambda: urls(probe))


@pytest.mark.parametrize("name", ["a..b", "a" * 64])
async def test_a_name_that_cannot_be_one_is_no_list(name: str) -> None:
    """What was listed before holds on, and nobody's sidecar ends."""
    with pytest.raises(ListUnreadable, match=f"engines_dns: {name}: .*label"):
        await DnsList(name, 8000).read()


async def test_a_file_that_does_not_come_is_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to, a share whose server is away: tried again later."""
    monkeypatch.setattr(engine_list, "READ_DEADLINE_S", 0.05)
    path = tmp_path / "engines"
    os.mkfifo(path)
    with pytest.raises(ListUnreadable, match=r"engines_file: .*TimeoutError"):
        await FileList(path).read()
    os.close(os.open(path, os.O_RDWR))  # lets go of whoever still waits there


async def test_a_file_that_is_being_written_is_no_list_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a list would take engines out, and half of a line would be an engine nobody has."""
    path = tmp_path / "engines"
    path.write_text("http://h:1\nhttp://h:80")
    files, sleep = FileList(path), asyncio.sleep

    async def written_meanwhile(delay_s: float) -> None:
        path.write_text("http://h:1\nhttp://h:8000\n")
        await sleep(delay_s)

    monkeypatch.setattr(engine_list.asyncio, "sleep", written_meanwhile)
    with pytest.raises(ListUnreadable, match="being written"):
        await files.read()
    assert await files.read() == ("http://h:1", "http://h:8000")


async def test_a_line_is_a_place_and_nothing_more(tmp_path: Path) -> None:
    """An engine below a path is none that routers could reach."""
    path = tmp_path / "engines"
    path.write_text("http://h:1/\nhttp://h:2/v1\nhttp://h:3?x\nhttp://h:4#x\nftp://h:5\n[::1]:6\n")
    assert await FileList(path).read() == ("http://h:1",)


def test_an_address_goes_when_it_was_missing_repeatedly() -> None:
    """Name servers leave some out of an answer; those that are gone stay out."""
    where = DnsList("engines", 8000)
    assert where.take(["10.0.0.1", "fd00::1"]) == ("http://10.0.0.1:8000", "http://[fd00::1]:8000")
    assert len(where.take(["10.0.0.1"])) == 2
    assert len(where.take(["10.0.0.1", "fd00::1"])) == 2
    for left in (2, 2, 1):
        assert len(where.take(["10.0.0.1"])) == left
