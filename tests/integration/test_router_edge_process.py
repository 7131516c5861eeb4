"""`python -m router` as its operator meets it, and text prompts through a real tokenizer."""

import asyncio
import json
import signal
import socket
import sys
from itertools import groupby
from typing import Any

import aiohttp
import pytest
from fleets import chain, reserved, store, until
from router_edge import CHUNKS, LAST_CHUNKS, FakeEngine, completion, edge, silent, stream_all
from router_process import ROOT, START_S, started
from transformers import AutoTokenizer
from waiting import until_equal

from indexer.contract import keys
from indexer.contract.identifiers import RouterId

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NOTICE_S = "4"
"""Within this somebody who looks again and again sees the notice, however busy the machine."""

TOKENIZER = ROOT / "workers" / "simulated" / "tokenizer"


async def test_sigterm_lets_a_stream_finish(redis_client, redis_socket) -> None:
    """Exit code 0, every byte delivered, every log line written; the admin port answers."""
    engine = FakeEngine("a", silent)
    url = f"unix://{redis_socket}"
    async with (
        edge(redis_client, redis_socket, engine),
        started("--redis_url", url, "--admin_port", "0", "--drain_notice_s", "0") as (
            router,
            ports,
        ),
        aiohttp.ClientSession() as client,
        asyncio.TaskGroup() as tasks,
    ):
        public, admin = (f"http://127.0.0.1:{ports[key]}" for key in ("port", "admin_port"))
        asked = tasks.create_task(client.post(f"{public}/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        router.send_signal(signal.SIGTERM)
        await until(lambda: drains(client, f"{admin}/ready"), "the drain is announced")
        engine.let_go.set()
        assert await (await asked).read() == b"".join((*CHUNKS, *LAST_CHUNKS))
        assert await asyncio.wait_for(router.wait(), START_S) == 0
        assert router.stdout is not None
        said = [json.loads(line)["event"] for line in (await router.stdout.read()).splitlines()]
        assert ("request_routed" in said, said[-1]) == (True, "router_stopped")


async def test_sigterm_is_announced_before_the_door_closes(redis_client, redis_socket) -> None:
    """Not ready, then no connections; the stream ends whole, and nothing of the router is left."""
    engine = FakeEngine("a", silent)
    url = f"unix://{redis_socket}"
    async with (
        edge(redis_client, redis_socket, engine) as other,
        started("--redis_url", url, "--admin_port", "0", "--drain_notice_s", NOTICE_S) as (
            router,
            ports,
        ),
        aiohttp.ClientSession() as client,
        asyncio.TaskGroup() as tasks,
    ):
        public, admin = (f"http://127.0.0.1:{ports[key]}" for key in ("port", "admin_port"))
        registered = keys.routers(other.fleet.fleet_id)
        others = set(await redis_client.zrange(registered, 0, -1))
        asked = tasks.create_task(client.post(f"{public}/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        assert await reserved(redis_client, other.fleet) == [(1, 64)]
        (own,) = set(await redis_client.zrange(registered, 0, -1)) - others
        answers = [200]
        await until_equal(answers[0], lambda: answered(f"{public}/ready"))
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            while answers[-1] is not None:
                answers.append(await answered(f"{public}/ready"))
        assert [status for status, _ in groupby(answers)] == [200, 503, None]
        assert await drains(client, f"{admin}/ready")
        engine.let_go.set()
        assert await (await asked).read() == b"".join((*CHUNKS, *LAST_CHUNKS))
        async with asyncio.timeout(START_S):
            assert await router.wait() == 0
        # At once, and not when its lease would have ended.
        assert await reserved(redis_client, other.fleet) == [(0, 0)]
        assert own not in await redis_client.zrange(registered, 0, -1)
        ledger = keys.ledger(other.fleet.fleet_id, RouterId(own.decode()))
        assert not await redis_client.exists(ledger)


async def test_one_connection_too_many_is_told_so_by_the_process(redis_socket) -> None:
    """On the loop that it runs on, whose transports are not asyncio's."""
    options = ("--redis_url", f"unix://{redis_socket}", "--connections_max", "1")
    async with started(*options) as (_, ports):
        held, too_many = [
            await asyncio.open_connection("127.0.0.1", ports["port"]) for _ in range(2)
        ]
        async with asyncio.timeout(START_S):
            assert await too_many[0].readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        for _, writer in (held, too_many):
            writer.close()


async def answered(url: str) -> int | None:
    """Status of a request over a connection of its own; None where nobody listens."""
    try:
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            return answer.status
    except aiohttp.ClientConnectionError:
        return None


async def drains(client: aiohttp.ClientSession, url: str) -> bool:
    """Whether a router says that it drains."""
    async with client.get(url) as answer:
        return (await answer.json()).get("reason") == "draining"


async def test_a_port_in_use_is_named() -> None:
    """One line that says which key to change, no trace."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--port", str(taken.getsockname()[1])),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(START_S):
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().startswith("port: cannot listen on 127.0.0.1:")


async def test_a_chat_finds_the_blocks_that_the_engine_made_of_it(
    redis_client, redis_socket
) -> None:
    """Template and tokenizer give the engine's ids, so its blocks are hits."""
    messages = [{"role": "user", "content": "The quick brown fox. " * 20}]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    engines = FakeEngine("a", stream_all), FakeEngine("b", stream_all)
    record = {"model_root": str(TOKENIZER)}
    async with edge(
        redis_client, redis_socket, *engines, record=record, tokenize_deadline_s=30.0
    ) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, token_ids))
        body = {"model": "m", "messages": messages, "stream": True}
        decision: dict[str, Any]
        async with one.client.post("/route", json=body) as answer:
            decision = await answer.json()
        hit_tokens = (len(token_ids) - 1) // 16 * 16
        assert hit_tokens > 0
        shown = [decision[key] for key in ("instance", "prompt_tokens", "hit_tokens")]
        assert shown == ["b", len(token_ids), hit_tokens]
