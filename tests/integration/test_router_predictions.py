"""A router tells how right it was: operators by view and metrics, sidecars by notices."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from builders import make_heartbeat
from fleets import chain, store
from router_edge import PROMPT, FakeEngine, completion, edge, plain, stream_all
from waiting import until, until_equal

from indexer.contract import fleet_functions, functions
from indexer.contract.identifiers import FleetId
from indexer.contract.link import connected
from indexer.contract.records import FleetRecord, IndexCounters, Notice
from router.index.notice_queue import NoticeQueue
from router.telemetry import NOTICES

pytestmark = pytest.mark.integration


async def heartbeat(client: Any, fleet: FleetRecord) -> tuple[float, list[Notice]]:
    """As the sidecar of slot 0 with half of what its engine holds: time and notices."""
    index = IndexCounters(blocks=3, completeness_ratio=0.5)
    call = make_heartbeat(fleet, 0, 1, index=index, counters=None)
    reply = fleet_functions.heartbeat_reply(await functions.run(client, call))
    assert reply is not None
    return reply.now_s, [Notice.decode(packed) for packed in reply.notices]


async def test_a_wrong_prediction_reaches_the_sidecar_and_the_operator(
    redis_client, redis_socket
) -> None:
    """The engine had 48 tokens that the index did not know; then it is known, and right."""
    engine = FakeEngine("h:1/0#x", stream_all)
    async with edge(redis_client, redis_socket, engine) as one:
        before_s, _ = await heartbeat(redis_client, one.fleet)
        async with one.client.post("/v1/completions", json=completion()) as answer:
            await answer.read()
        told: list[Notice] = []

        async def arrived() -> bool:
            now_s, notices = await heartbeat(redis_client, one.fleet)
            told.extend(notices)
            assert all(before_s <= notice.decided_s <= now_s for notice in notices)
            return bool(told)

        await until(arrived, "a notice")
        hashes = chain(one.fleet, PROMPT)
        (notice,) = told
        assert (notice.predicted_tokens, notice.actual_tokens) == (0, 48)
        assert notice.hashes == b"".join(hashes[:4])

        await store(redis_client, one.fleet, 0, hashes[:3])
        engine.script = plain
        async with one.client.post("/v1/completions", json=completion(stream=False)) as answer:
            await answer.read()

        async with one.client.get("/fleet") as answer:
            (fleet,) = (await answer.json())["fleets"]
        (instance,) = fleet["instances"]
        assert (instance["completeness_ratio"], instance["index_blocks"]) == (0.5, 3)
        expected = {
            "compared": 2,
            "exact_ratio": 0.5,
            "over": 0,
            "under": 1,
            "hit_ratio_predicted": 0.375,
            "hit_ratio_actual": 0.75,
        }
        assert (fleet["predictions"], instance["predictions"]) == (expected, expected)

        async def exported() -> set[str]:
            async with one.client.get("/metrics") as answer:
                lines = (await answer.text()).splitlines()
            of_this_test = 'fleet="m"}', 'fleet="m",instance="h:1/0"}'
            ratios = [line for line in lines if "_ratio{" in line]
            return {line for line in ratios if line.partition("{")[2].startswith(of_this_test)}

        await until_equal(
            {
                'timestable_router_exact_prediction_ratio{fleet="m"} 0.5',
                'timestable_router_instance_completeness_ratio{fleet="m",instance="h:1/0"} 0.5',
            },
            exported,
        )


async def test_notices_that_cannot_be_told_are_counted(tmp_path: Path) -> None:
    """Nobody waits for them, and the next ones are tried all the same."""
    before = NOTICES.labels(result="failed")._value.get()
    notice = Notice(decided_s=0.0, predicted_tokens=0, actual_tokens=16, hashes=b"h" * 16)
    async with connected(f"unix://{tmp_path}/nobody.sock") as link:
        notices = NoticeQueue(link, deadline_s=0.05)
        notices.tell(FleetId("f"), 0, 1, notice)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(notices.run())
            await until(lambda: NOTICES.labels(result="failed")._value.get() == before + 1, "one")
            notices.tell(FleetId("f"), 0, 1, notice)
            await until(lambda: NOTICES.labels(result="failed")._value.get() == before + 2, "two")
            running.cancel()
    assert notices.waiting() == 0
