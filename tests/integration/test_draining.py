"""An engine is drained: real sidecars, simulated engines, a real router."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from builders import make_fleet_record, make_instance
from engine_stand_in import EngineStandIn
from free_ports import free_ports
from prometheus_client import CollectorRegistry
from sidecar_run import Probe, metric
from sidecar_run import running as sidecar
from simulated_engine import running as simulated
from waiting import until, until_equal

from indexer.admin_api import serving
from indexer.contract.link import connected
from indexer.contract.records import EngineCounters, SlotFlag
from indexer.draining import Drain, RankLoad
from indexer.publishing.membership import Membership
from indexer.publishing.sweeper import SweeperLease
from indexer.telemetry import Telemetry
from router.composition import composed
from router.config import RouterConfig
from router.eligibility import ineligible_reason

pytestmark = pytest.mark.integration

DRAINED = SlotFlag.USED | SlotFlag.DRAINING
ROOT = Path(__file__).parents[2]
IDLE = RankLoad(
    reserved_requests=0,
    counters=EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0),
)


@dataclass(frozen=True, kw_only=True)
class Url:
    """Where an engine answers."""

    url: str


async def ask(client: aiohttp.ClientSession, tokens: int) -> tuple[int, str]:
    """Status and text of a completion of a prompt nobody has."""
    body = {"model": "m", "prompt": [7] * 32, "max_tokens": tokens, "ignore_eos": True}
    async with client.post("/v1/completions", json=body | {"stream": True}) as answer:
        return answer.status, await answer.text()


async def drained_by_command(port: int, *args: str) -> tuple[int, str]:
    """Exit status and standard output of the command."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "indexer", "drain"),
        *(f"--sidecar_url=http://127.0.0.1:{port}", *args),
        cwd=ROOT,
        stdout=PIPE,
    )
    async with asyncio.timeout(20):
        out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode()


@asynccontextmanager
async def admin(drain: Drain) -> AsyncIterator[int]:
    """The port of a sidecar's own HTTP."""
    (port,) = free_ports(1)
    async with serving("127.0.0.1", port, CollectorRegistry(), drain):
        yield port


async def test_the_flag_outlives_slot_and_redis(
    redis_client: redis.asyncio.Redis, redis_socket: Path, probe: Probe
) -> None:
    """Every heartbeat carries the wish, also after Redis was emptied; resume takes it back."""
    drain = Drain()
    async with EngineStandIn() as engine, sidecar(engine, redis_socket, drain=drain) as registry:
        await until_equal({0: SlotFlag.USED}, probe.slots)
        drain.wish(is_draining=True)
        await until_equal({0: DRAINED}, probe.slots)
        await until(lambda: metric(registry, "draining") == 1, "the gauge says so")
        await redis_client.flushall()
        await until_equal({0: DRAINED}, probe.slots)
        drain.wish(is_draining=False)
        await until_equal({0: SlotFlag.USED}, probe.slots)


async def test_a_drained_engine_joins_drained(redis_socket: Path, probe: Probe) -> None:
    """No moment between taking a slot and its first heartbeat at which routers may choose it."""
    drain = Drain(is_draining=True)
    async with connected(f"unix://{redis_socket}", deadline_s=2.0) as link:
        founding = make_fleet_record()
        membership = Membership(
            link,
            founding=founding,
            record=make_instance(),
            sweeper_lease=SweeperLease(link, founding.fleet_id),
            telemetry=Telemetry(CollectorRegistry()),
            on_loss=lambda: None,
            state=drain.flags,
        )
        for before, slot in (({}, 0), ({0: DRAINED | SlotFlag.CLOSING}, 1)):  # also when moving
            await membership.join()
            assert await probe.slots() == before | {slot: DRAINED}
            counters = await probe.counters()
            assert counters is not None
            assert ineligible_reason(counters.slots[slot], counters.now_s) == "draining"


@pytest.mark.parametrize("policy", ["lmetric", "round_robin"])
async def test_the_only_engine_drains(redis_socket: Path, probe: Probe, policy: str) -> None:
    """The stream in flight ends whole, new requests get 503 with the reason, resume ends that."""
    drain = Drain()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated(model_name="m", speedup=5.0))
        base = Url(url=str(engine.http._base_url).rstrip("/"))
        await stack.enter_async_context(sidecar(base, redis_socket, drain=drain))
        await until_equal({0: SlotFlag.USED}, probe.slots)
        config: dict[str, Any] = {"redis_url": f"unix://{redis_socket}", "port": 0}
        process = await stack.enter_async_context(composed(RouterConfig(**config, policy=policy)))
        await process.index.refresh()
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}")
        )
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(ask(client, 200))
            await until(lambda: drain.state()["running_count"], "it runs")
            drain.wish(is_draining=True)
            await until_equal({0: DRAINED}, probe.slots)
            assert not drain.state()["empty"]
            await process.index.refresh()
            async with client.get("/fleet") as answer:
                assert '"ineligible_reason": "draining"' in await answer.text()
            status, text = await ask(client, 1)
            assert status == 503
            assert "draining" in text
            assert not streamed.done()
        status, text = streamed.result()
        assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
        await until(lambda: drain.state()["empty"], "nothing is in flight")
        drain.wish(is_draining=False)
        await until_equal({0: SlotFlag.USED}, probe.slots)
        assert (await ask(client, 1))[0] == 200


async def test_the_command_waits_until_empty(redis_socket: Path, probe: Probe) -> None:
    """0 once nothing is in flight, 1 while something is, 3 without a sidecar; resume resumes."""
    engine, drain = EngineStandIn(running_count=1), Drain()
    async with admin(drain) as port, engine, sidecar(engine, redis_socket, drain=drain):
        await until_equal({0: SlotFlag.USED}, probe.slots)
        status, out = await drained_by_command(port, "--wait_s=0.6")
        assert (status, "running_count=1" in out) == (1, True)
        engine.running_count = 0
        status, out = await drained_by_command(port, "--wait_s=15")
        assert (status, "empty=true" in out) == (0, True)
        assert (await drained_by_command(port, "--resume"))[0] == 0
        await until_equal({0: SlotFlag.USED}, probe.slots)
    assert (await drained_by_command(port, "--wait_s=1"))[0] == 3


async def test_the_command_asks_again() -> None:
    """A sidecar that has answered once may be silent for a while, and the drain still ends."""
    drain = Drain()
    drain.expect(["0"])
    (port,) = free_ports(1)
    args = ("-m", "indexer", "drain", f"--sidecar_url=http://127.0.0.1:{port}", "--wait_s=15")
    registry = CollectorRegistry()
    async with asyncio.timeout(20):
        async with serving("127.0.0.1", port, registry, drain):
            child = await asyncio.create_subprocess_exec(
                sys.executable, *args, cwd=ROOT, stdout=PIPE, stderr=PIPE
            )
            assert child.stdout is not None
            assert b"draining=true" in await child.stdout.readline()
        assert child.stderr is not None
        assert b"error: sidecar_url: " in await child.stderr.readline()
        drain.heard("0", IDLE, is_draining=True)
        async with serving("127.0.0.1", port, registry, drain):
            out, _ = await child.communicate()
    assert (child.returncode, b"empty=true" in out) == (0, True)


async def test_the_runbooks_hook_waits_until_empty() -> None:
    """What an engine's container runs before it stops: it drains, and ends once that is done."""
    text = (ROOT / "deploy" / "RUNBOOK.md").read_text()
    script = dedent(text.partition("- python3\n")[2].partition("- |\n")[2].partition("```")[0])
    drain = Drain()
    drain.expect(["0"])
    async with admin(drain) as port:
        own = script.replace("127.0.0.1:9100", f"127.0.0.1:{port}")
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", own)
        try:
            await until(lambda: drain.is_draining, "it asked")
            assert child.returncode is None
            drain.heard("0", IDLE, is_draining=True)
            async with asyncio.timeout(10):
                assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()


async def test_metrics_and_health_are_beside_it() -> None:
    """Prometheus and probes ask the same port; draining twice is draining once."""
    drain = Drain()
    async with admin(drain) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        for path in ("/metrics", "/health", "/state"):
            async with http.get(path) as answer:
                assert answer.status == 200
        for _ in range(2):
            async with http.post("/drain") as answer:
                assert (await answer.json())["draining"] is True


def test_nothing_is_empty_that_is_not_known() -> None:
    """Only when every rank's heartbeat carried the wish, and its engine told what runs."""
    drain = Drain()
    drain.expect(["0", "1"])
    drain.wish(is_draining=True)
    drain.heard("0", IDLE, is_draining=True)
    drain.heard("1", IDLE, is_draining=False)
    assert not drain.state()["announced"]
    drain.heard("1", RankLoad(reserved_requests=0, counters=None), is_draining=True)
    assert (drain.state()["announced"], drain.state()["empty"]) == (True, False)
    drain.heard("1", IDLE, is_draining=True)
    assert drain.state()["empty"]
    drain.unheard("0")
    assert not drain.state()["empty"]
