"""A router that records what it answers, and the analysis and the lab's reader of that file."""

import json
from pathlib import Path

import pytest
import redis.asyncio
from aiohttp import web
from prometheus_client import REGISTRY
from router_edge import PROMPT, FakeEngine, chat, completion, edge, stream_all
from waiting import until_equal

from loadgen.__main__ import main
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import read_rows

pytestmark = pytest.mark.integration


def _written() -> float:
    name = "timestable_router_recorded_requests_total"
    return REGISTRY.get_sample_value(name, {"result": "written"}) or 0.0


async def _refuse_three_tokens(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    if json.loads(engine.bodies[-1]).get("prompt") == [1, 2, 3]:
        return web.json_response({"error": {"message": "no"}}, status=400)
    return await stream_all(engine, request)


async def test_recorded_traffic_is_analysed_and_replayed(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """Two turns and a chat come back as rows that share what the prompts shared, and no text."""
    trace, before = tmp_path / "trace.jsonl", _written()
    follow_up = completion(prompt=[*PROMPT, *range(500, 564)])
    engine = FakeEngine("a", _refuse_three_tokens)
    async with edge(redis_client, redis_socket, engine, record_trace=str(trace)) as front:
        for body, headers in (
            (completion(), {"x-session-id": "confidential-session"}),
            (follow_up, {"x-session-id": "confidential-session"}),
            (completion(prompt=[1, 2, 3]), {}),
            (chat("a confidential question " * 20) | {"stream": True}, {}),
        ):
            kind = "chat/completions" if "messages" in body else "completions"
            async with front.client.post(f"/v1/{kind}", json=body, headers=headers) as answer:
                await answer.read()
        await until_equal(before + 3, _written)
    assert "confidential" not in trace.read_text()
    first, second, asked = read_rows([trace], ReadOptions())
    assert (first.prompt_tokens, second.prompt_tokens) == (64, 128)
    assert second.full_blocks[: len(first.full_blocks)] == first.full_blocks
    assert second.parent_id == first.request_id
    assert (second.session_id, second.turn) == (first.session_id, 1)
    assert [row.category for row in (first, asked)] == ["completions", "chat/completions"]
    assert main(["analyze", str(trace), "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["traces"]["trace"]
    assert found["sessions"] == 2
    assert found["multi_turn"]["own_session_ratio"] == 1
    assert found["ideal_hit_ratio"] == 64 / (64 + 128 + asked.prompt_tokens)
