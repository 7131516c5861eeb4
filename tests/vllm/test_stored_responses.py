"""Answers that real engines keep in their memory, asked for through either router."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts
from tests.vllm.settings import NAME

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]

CONVERSATIONS = 4
TURNS = 3
TIMEOUT_S = 60.0
LONG: Any = {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
"""Some seconds of work, so that it is still under way when it is asked for."""


@pytest_asyncio.fixture(loop_scope="session")
async def clients(fleet: RealFleet) -> AsyncIterator[tuple[openai.AsyncOpenAI, ...]]:
    """OpenAI's, one of each router."""
    made = tuple(
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
        for url in fleet.router_urls
    )
    yield made
    for one in made:
        await one.close()


async def test_conversations_go_on_where_they_are_held(
    clients: tuple[openai.AsyncOpenAI, ...],
) -> None:
    """Each turn through the other router: the engine finds the last one, and promises hold.

    A stream's answers are held as plain ones are.
    """
    prompts = Prompts(41)
    for number in range(CONVERSATIONS):
        previous, input_tokens, places = None, 0, set()
        for turn in range(TURNS):
            create = clients[turn % 2].responses.with_raw_response.create
            raw = await create(
                model=NAME,
                input=prompts.words(40),
                previous_response_id=previous or openai.omit,
                max_output_tokens=4,
                extra_headers={"x-timestable-explain": "1"},
                stream=bool(number % 2),
            )
            decision = json.loads(raw.headers["x-timestable-decision"])
            answer: Any = raw.parse()
            if number % 2:
                answer = [event async for event in answer][-1].response
            assert answer.status in ("completed", "incomplete")
            assert answer.usage.input_tokens > input_tokens, "the conversation is in the prompt"
            if previous is not None:
                assert decision["hit_tokens"] == 0, "nothing is claimed of what nobody knows"
                assert answer.usage.input_tokens_details.cached_tokens > 0
            places.add(raw.headers["x-timestable-instance"])
            previous, input_tokens = answer.id, answer.usage.input_tokens
        assert len(places) == 1
        read = await clients[0].responses.retrieve(previous or "")
        assert read.id == previous
    # Whom it went to is no accident: unknown ones are known to nobody.
    for one in clients:
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            await one.responses.retrieve("resp_unknown")
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            await one.responses.create(model=NAME, input="x", previous_response_id="resp_unknown")


async def test_answers_in_the_background_are_followed_and_cancelled(
    clients: tuple[openai.AsyncOpenAI, ...],
) -> None:
    """A stream that its client left is taken up at the other router where it was; one is ended."""
    words = Prompts(42).words(30)
    stream = await clients[0].responses.create(
        model=NAME, input=words, background=True, stream=True, max_output_tokens=24
    )
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 4:
            break
    await stream.close()
    response_id = seen[0].response.id
    rest = await clients[1].responses.retrieve(
        response_id, stream=True, starting_after=seen[-1].sequence_number
    )
    seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    assert seen[-1].type == "response.completed"

    begun = [
        await clients[0].responses.create(model=NAME, input=words, background=True, **LONG)
        for _ in range(2)
    ]
    assert {one.status for one in begun} == {"queued"}
    for one in begun:
        assert (await clients[1].responses.retrieve(one.id)).id == one.id
        ended = await clients[1].responses.cancel(one.id)
        assert ended.status == "cancelled"
        assert (await clients[0].responses.retrieve(one.id)).status == "cancelled"
