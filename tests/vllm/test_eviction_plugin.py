"""Real vLLM with the workload-aware order of eviction, against the same vLLM without it.

The last test asks a whole engine through a router: that starts while the others compute.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
import pytest_asyncio
from waiting import until_equal

from tests.vllm.asking import Asked, Asker
from tests.vllm.aware_engine import AwareEngine
from tests.vllm.driving import driven
from tests.vllm.plugin_path import plugin_path
from tests.vllm.prompts import Prompts
from tests.vllm.settings import BLOCK, MODEL, NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

CAPACITY_BLOCKS: Final = 48
"""A third of what passes between two visits of a session."""

SESSIONS: Final = 5
VISITS: Final = 5
ROUNDS: Final = 2
VISIT_S: Final = 12.0


def workload() -> list[dict[str, Any]]:
    """Sessions of two quick turns every 12 s, between single questions that never come back.

    Two of the questions come together, one without a category; all else comes alone.
    """
    prompts = Prompts(70)
    requests: list[dict[str, Any]] = []

    def ask(at_s: float, prompt: Sequence[int], category: str | None) -> None:
        requests.append(
            {
                "id": f"r{len(requests)}",
                "at_s": at_s,
                "prompt": list(prompt),
                "output_tokens": 2,
                "category": category,
            }
        )

    for round_number in range(ROUNDS):
        sessions = [prompts.blocks(2, beyond=5) for _ in range(SESSIONS)]
        for visit in range(VISITS):
            for number in range(SESSIONS):
                visits = round_number * VISITS + visit + number / SESSIONS
                for quick in range(2):
                    at_s = visits * VISIT_S + quick * 0.4
                    ask(at_s, sessions[number], f"chat:{2 * visit + quick}")
                    sessions[number] += prompts.ids(BLOCK // 2)
                ask(at_s + 0.5, prompts.blocks(8), "once:0")
                ask(at_s + 1.0, prompts.blocks(6), None)
                ask(at_s + 1.0, prompts.blocks(6), "once:0")
    return requests


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where vLLM finds the plugin."""
    return plugin_path(tmp_path_factory.mktemp("plugins"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aware(path: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AwareEngine]:
    """An engine that evicts by category, behind a router; it may be starting still."""
    async with AwareEngine.starting(tmp_path_factory.mktemp("aware"), path) as starting:
        yield starting


@pytest.fixture(scope="module")
def results(path: str, aware: AwareEngine) -> list[dict[str, Any]]:
    """What the driver printed, run once: vLLM's imports take longer than the requests."""
    del aware  # started before, so that its imports have the other core
    wanted = {
        "model": str(MODEL),
        "engine": {
            "block_size_tokens": BLOCK,
            "capacity_blocks": CAPACITY_BLOCKS,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
        },
        "requests": workload(),
    }
    results: list[dict[str, Any]] = driven("eviction_driver.py", wanted, python_path=path)
    return results


def answers(result: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens by request."""
    return {
        name: tokens for group in result["groups"] for name, (tokens, _) in group["answers"].items()
    }


def hit_tokens(result: dict[str, Any]) -> int:
    """Over all requests."""
    return sum(cached for group in result["groups"] for _, cached in group["answers"].values())


def test_same_answers(results: list[dict[str, Any]]) -> None:
    """Which block is evicted changes no token of any answer."""
    off, _, on = results
    assert (off["pool"], on["pool"]) == ("BlockPool", "WorkloadAwareBlockPool")
    assert answers(on) == answers(off)
    assert len(answers(on)) == len(workload())


def test_hits_more(results: list[dict[str, Any]], record_property: Any) -> None:
    """Where the cache is far too small, sessions find more of their history than under LRU."""
    off, _, on = results
    prompt_tokens = sum(len(request["prompt"]) for request in workload())
    ratios = {name: hit_tokens(one) / prompt_tokens for name, one in (("lru", off), ("aware", on))}
    cost = {name: one["take_us"] for name, one in (("lru", off), ("aware", on))}
    print(f"hit ratio {ratios}, us to take a block {cost}")  # noqa: T201
    record_property("hit_ratio", ratios)
    record_property("take_us", cost)
    assert ratios["aware"] > 1.2 * ratios["lru"]


@pytest.mark.parametrize("which", [0, 2], ids=["off", "on"])
def test_events_are_true(results: list[dict[str, Any]], which: int) -> None:
    """A request that comes alone hits exactly what the events before it tell to be resident."""
    prompts = {request["id"]: request["prompt"] for request in workload()}
    resident: Counter[tuple[int, ...]] = Counter()
    content: dict[str, tuple[int, ...]] = {}
    evicted = 0
    for group in results[which]["groups"]:
        if len(group["answers"]) == 1:
            ((name, (_, cached)),) = group["answers"].items()
            prompt, depth = prompts[name], 0
            while resident[tuple(prompt[: (depth + 1) * BLOCK])]:
                depth += 1
            assert cached == min(depth, (len(prompt) - 1) // BLOCK) * BLOCK
        for event in group["events"]:
            for place, block_hash in enumerate(event["hashes"]):
                if event["type"] == "BlockStored":
                    parent = event["hashes"][place - 1] if place else event["parent"]
                    before = () if parent is None else content[parent]
                    tokens = event["tokens"][place * BLOCK : (place + 1) * BLOCK]
                    content[block_hash] = (*before, *tokens)
                    resident[content[block_hash]] += 1
                else:
                    resident[content[block_hash]] -= 1
                    evicted += 1
    assert evicted > 10 * CAPACITY_BLOCKS


def test_unknown_version_is_left_alone(results: list[dict[str, Any]]) -> None:
    """The plugin does not load in a vLLM it was not tested with, and says which it knows."""
    _, refused, on = results
    assert refused["pool"] == "BlockPool"
    (line,) = refused["log"]
    assert "0.33.0" in line
    assert "0.32.0" in line
    loaded, *categories = on["log"][1:]
    assert loaded == "free KV blocks are reused in workload-aware order"
    assert len(categories) == 2 * VISITS + 1


def test_the_wheel_is_enough(results: list[dict[str, Any]], path: str) -> None:
    """What pip installs without our dependencies holds both plugins and all that they import."""
    installed = results[2]["installed"]
    assert installed["loggers"] == {"timestable_steps": "workers.vllm.step_stats_plugin"}
    assert all(place.startswith(path) for place in installed["places"]), installed["places"]
    assert not installed["has_our_libraries"]


CONVERSATIONS: Final = 12
"""Of 7 blocks each, that end after one follow-up: nearly twice what the engine holds."""


class Conversation:
    """A chat, asked turn by turn."""

    def __init__(self, asker: Asker, prompts: Prompts) -> None:
        self._asker, self._prompts = asker, prompts
        self._messages: list[dict[str, str]] = []

    async def say(self, words: int) -> Asked:
        """The next turn, of new words."""
        self._messages.append({"role": "user", "content": self._prompts.words(words)})
        asked = await self._asker.chat(self._messages)
        assert asked.error is None, asked.error
        self._messages.append({"role": "assistant", "content": asked.text})
        return asked


def full_blocks_tokens(asked: Asked) -> int:
    """Of a prompt."""
    return len(asked.prompt_ids) // BLOCK * BLOCK


@pytest.mark.asyncio(loop_scope="module")
async def test_turns_through_a_router(results: list[dict[str, Any]], aware: AwareEngine) -> None:
    """By the turns that a router tells, what ended goes before what will be followed up."""
    del results  # asked when those are through
    await aware.wait_ready()
    asker, prompts = Asker(session=aware.session, router_urls=[aware.router_url]), Prompts(73)
    waiting = Conversation(asker, prompts)
    first = await waiting.say(80)
    ended = [Conversation(asker, prompts) for _ in range(CONVERSATIONS)]
    for conversation in ended:
        opening = await conversation.say(80)
        assert (await conversation.say(40)).actual_tokens == full_blocks_tokens(opening)
    assert (await waiting.say(5)).actual_tokens == full_blocks_tokens(first)  # freed before them
    assert (await ended[0].say(5)).actual_tokens == 0
    await until_equal(["chat:0", "chat:1", "chat:2"], aware.categories)


@pytest.mark.asyncio(loop_scope="module")
async def test_categories_of_clients(aware: AwareEngine) -> None:
    """Its own header passes the router, and `vllm_xargs` come before the header of a router."""
    await aware.wait_ready()
    known, prompts = aware.categories(), Prompts(74)
    for headers, extra in (
        ({"x-timestable-category": "agent:tool"}, {}),
        ({}, {"vllm_xargs": {"timestable_category": "batch:0"}}),
    ):
        body = {"model": NAME, "prompt": prompts.blocks(2), "max_tokens": 1, **extra}
        async with aware.session.post(
            f"{aware.router_url}/v1/completions", json=body, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
    await until_equal([*known, "agent:tool", "batch:0"], aware.categories)
