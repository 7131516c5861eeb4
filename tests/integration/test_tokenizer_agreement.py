"""Engines whose token ids are not this router's are found, told and served."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web
from builders import make_fleet_record, make_instance
from prometheus_client import REGISTRY
from simulated_engine import running
from tokenizer_kinds import SHIPPED
from waiting import until, until_equal

from indexer.contract.block_hash import pack_tokens
from router import telemetry
from router.eligibility import Roster
from router.index.known_fleets import ServedModel
from router.requests.api_call import ChatPrompt
from router.tokens import agreement
from router.tokens.tokenize import ModelTokenizers

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    """Gauges are the process's: another test's router may have left one of this model."""
    telemetry.TOKENIZER_AGREES.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tokenizer that simulated engines ship, to be changed."""
    return Path(shutil.copytree(SHIPPED, tmp_path / "tokenizer"))


def served(url: str, root: Path) -> ServedModel:
    """Model m, served by one instance."""
    return ServedModel(
        name="m",
        fleet=make_fleet_record(),
        adapter=None,
        max_model_len_tokens=4096,
        model_root=str(root),
        roster=Roster.of({0: make_instance("a", url=url)}),
    )


@asynccontextmanager
async def asking(models: dict[str, ServedModel]) -> AsyncIterator[ModelTokenizers]:
    """Tokenizers that are loaded and compared in the background."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tokenizers.run(lambda: models))
        try:
            yield tokenizers
        finally:
            task.cancel()
            tokenizers.close()


def agrees() -> float | None:
    """The gauge of model m."""
    return REGISTRY.get_sample_value("timestable_router_tokenizer_agrees", {"model": "m"})


def seen_by_operators(tokenizers: ModelTokenizers) -> bool | None:
    """What /fleet says of the instance."""
    fleet: dict[str, Any] = {"model_scope": "m", "instances": [{"instance_id": "a"}]}
    tokenizers.annotate({"fleets": [fleet]}, {})
    told: bool | None = fleet["instances"][0]["tokenizer_agrees"]
    return told


def another_template(folder: Path) -> None:
    """As an engine has it that was started with --chat-template."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = config["chat_template"].replace("message.role", "'-' + message.role")
    path.write_text(json.dumps(config))


def another_tokenizer(folder: Path) -> None:
    """As when the operator's mapping names the wrong folder."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tokenizer))


def unchanged(_: Path) -> None:
    """The engine's own."""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (unchanged, None),
        (another_template, "template-differs"),
        (another_tokenizer, "tokenizer-differs"),
    ],
)
async def test_a_difference_is_told(folder: Path, change: Any, problem: str | None) -> None:
    """By a gauge, in /fleet, and in a log line that says what to do."""
    change(folder)
    with structlog.testing.capture_logs() as lines:
        async with running() as live:
            models = {"m": served(str(live.http._base_url), folder)}
            async with asking(models) as tokenizers:
                await until_equal(0.0 if problem else 1.0, agrees)
                assert seen_by_operators(tokenizers) is (problem is None)
                models.clear()
                await until_equal(None, agrees)
    told = [line for line in lines if line["event"] == "tokenizer_differs"]
    assert [line["problem"] for line in told] == ([problem] if problem else [])
    assert all("--tokenizers" in line["remedy"] for line in told)


@pytest.mark.parametrize("answer", ["not found", "nonsense", "too much", "wrong types"])
async def test_an_engine_that_does_not_say_is_left_alone(
    folder: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few questions it is asked no more, and nothing is claimed about it."""
    monkeypatch.setattr(agreement, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(agreement, "ASK_AGAIN_S", 0.0)
    asked: list[str] = []

    async def tokenize(request: web.Request) -> web.Response:
        asked.append(request.path)
        if answer == "not found":
            raise web.HTTPNotFound
        return web.Response(
            text={
                "nonsense": '{"tokens": [1,',
                "too much": " " * (agreement.ANSWER_BYTES_MAX + 1),
                "wrong types": '{"tokens": [1, "a"]}',
            }[answer]
        )

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    models = {"m": served(f"http://127.0.0.1:{runner.addresses[0][1]}", folder)}
    looked: list[int] = []
    async with asking(models) as tokenizers:
        await until_equal(agreement.ASKED_MAX, lambda: len(asked))
        monkeypatch.setattr(tokenizers._agreement, "_forget", lambda _: looked.append(1))
        await until(lambda: len(looked) > 2, "looked again")
        assert seen_by_operators(tokenizers) is None
    assert len(asked) == agreement.ASKED_MAX
    assert agrees() is None
    await runner.cleanup()


async def test_every_turn_of_a_chat_has_the_engines_ids() -> None:
    """Whatever people write, also the names of special tokens, and nothing at all."""
    said = ["Hi", "", " <|im_end|> <|im_", "\u00e9e\u0301 \u4f60\u597d\n\n", "<|im_start|>s\n", " "]
    messages: list[dict[str, Any]] = []
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    async with running() as live:
        model = served(str(live.http._base_url), SHIPPED)
        for turn in range(2 * len(said)):
            role = "assistant" if turn % 2 else "user"
            messages.append({"role": role, "content": said[turn % len(said)] * (1 + turn // 6)})
            answer = await live.post("/tokenize", model="m", messages=messages)
            ids = await tokenizers._ids(model, ChatPrompt(messages=messages))
            assert ids == pack_tokens(answer["tokens"])
    tokenizers.close()
