"""OpenAI's and Anthropic's own clients, unchanged; with real engines: tests/vllm."""

import anthropic
import openai
import pytest
from fleets import until
from router_edge import Edge, FakeEngine, broken_stream, edge, one_chunk, stream_all

pytestmark = pytest.mark.integration

KEY = "a-client-key-of-tests"


def openais(one: Edge, key: str = KEY) -> openai.AsyncOpenAI:
    """That asks once."""
    url = f"http://127.0.0.1:{one.process.listeners.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


def anthropics(one: Edge, key: str = KEY) -> anthropic.AsyncAnthropic:
    """That asks once."""
    url = f"http://127.0.0.1:{one.process.listeners.port}"
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_what_a_router_refuses_is_the_clients_own_error(redis_client, redis_socket) -> None:
    """By status and in the words that each client reads."""
    messages = [{"role": "user", "content": "hi"}]
    async with edge(redis_client, redis_socket, FakeEngine("a", stream_all), api_keys=KEY) as one:
        for model, key, names in (
            ("m", "another-key", "AuthenticationError"),
            ("nobodys", KEY, "NotFoundError"),
            (7, KEY, "BadRequestError"),
        ):
            async with openais(one, key) as asked, anthropics(one, key) as other:
                with pytest.raises(getattr(openai, names)) as refused:
                    await asked.completions.create(model=model, prompt="hi")  # type: ignore[arg-type]
                assert refused.value.code == refused.value.response.headers["x-timestable-reason"]
                with pytest.raises(getattr(anthropic, names)):
                    await other.messages.create(model=model, max_tokens=5, messages=messages)  # type: ignore[arg-type]


async def test_a_stream_is_read_to_its_end(redis_client, redis_socket) -> None:
    """Text and usage, and a key that is known."""
    async with (
        edge(redis_client, redis_socket, FakeEngine("a", stream_all), api_keys=KEY) as one,
        openais(one) as client,
    ):
        stream = await client.completions.create(model="m", prompt="hi", stream=True)
        events = [event async for event in stream]
        assert [one.choices[0].text for one in events if one.choices] == ["one", "two"]
        assert events[-1].usage is not None
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_a_stream_that_breaks_is_an_error(redis_client, redis_socket) -> None:
    """Never an answer that looks complete."""
    async with (
        edge(redis_client, redis_socket, FakeEngine("a", broken_stream)) as one,
        openais(one) as client,
    ):
        stream = await client.completions.create(model="m", prompt="hi", stream=True)
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "upstream-failed"


async def test_a_stream_that_is_closed_ends_at_the_engine(redis_client, redis_socket) -> None:
    """Cancelled by its client, behind the first event."""
    engine = FakeEngine("a", one_chunk)
    async with edge(redis_client, redis_socket, engine) as one, openais(one) as client:
        stream = await client.completions.create(model="m", prompt="hi", stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(engine.aborted.is_set, "the engine is told")
        await one.settled()


async def test_a_client_that_times_out_is_gone_at_the_engine(redis_client, redis_socket) -> None:
    """It hears its own error."""
    engine = FakeEngine("a", one_chunk)
    async with edge(redis_client, redis_socket, engine) as one, openais(one) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model="m", prompt="hi", timeout=2)
        await until(engine.aborted.is_set, "the engine is told")
        await one.settled()
