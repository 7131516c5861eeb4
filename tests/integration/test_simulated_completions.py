"""Completions of the simulated engine over real HTTP: texts, chunks, usage."""

import asyncio
import json
import time

import pytest
from simulated_engine import MESSAGES, running

pytestmark = pytest.mark.integration


async def test_streamed_and_plain_chat_say_the_same() -> None:
    """The pieces of a stream join to the text of the plain answer."""
    async with running() as live:
        path = "/v1/chat/completions"
        plain = await live.post(path, messages=MESSAGES, max_tokens=20)
        events = await live.events(path, messages=MESSAGES, max_tokens=20)
    chunks = [json.loads(event) for event in events[:-1]]
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert (events[-1], len(chunks)) == ("[DONE]", 21)
    assert "".join(pieces) == plain["choices"][0]["message"]["content"]


async def test_chat_chunks_have_the_keys_of_vllm() -> None:
    """Role first, then one token per chunk, the reason with the last, the usage behind it."""
    async with running() as live:
        events = await live.events(
            "/v1/chat/completions",
            messages=MESSAGES,
            max_tokens=2,
            stream_options={"include_usage": True},
        )
    first, second, third, usage = (json.loads(event) for event in events[:-1])
    head = ["id", "object", "created", "model", "choices"]
    choice = ["index", "delta", "logprobs", "finish_reason"]
    assert list(first) == [*head, "prompt_token_ids"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert list(second) == head
    assert list(second["choices"][0]) == [*choice, "token_ids"]
    assert list(third["choices"][0]) == [*choice, "stop_reason", "token_ids"]
    assert third["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)


async def test_completion_chunks_have_the_keys_of_vllm() -> None:
    """Text completions carry `text` and no role chunk."""
    async with running() as live:
        events = await live.events("/v1/completions", prompt=[5, 6, 7], max_tokens=2)
    chunk = json.loads(events[0])
    keys = ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids"]
    assert (len(events), chunk["object"]) == (3, "text_completion")
    assert list(chunk["choices"][0]) == [*keys, "token_ids"]


async def test_repeat_reports_cached_tokens() -> None:
    """Usage tells what the engine found resident, under the last-token rule."""
    prompt = list(range(100, 164))
    async with running() as live:
        answers = [
            await live.post("/v1/completions", prompt=prompt, max_tokens=1) for _ in range(2)
        ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 48]


async def test_follow_up_turn_hits_its_own_answer() -> None:
    """A chat that sends the answer back hits the blocks the answer filled."""
    async with running() as live:
        path = "/v1/chat/completions"
        first = await live.post(path, messages=MESSAGES, max_tokens=64)
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        more = [*MESSAGES, reply, {"role": "user", "content": "Go on."}]
        second = await live.post(path, messages=more, max_tokens=1)
    computed = first["usage"]["total_tokens"] - 1
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == computed // 16 * 16


async def test_salted_request_does_not_hit() -> None:
    """`cache_salt` separates caches."""
    async with running() as live:
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
        salted = await live.post(
            "/v1/completions", prompt=[9] * 40, max_tokens=1, cache_salt="tenant"
        )
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_several_prompts_and_choices_are_numbered() -> None:
    """Index = prompt number x n + choice number; choices of one prompt differ."""
    async with running() as live:
        answer = await live.post("/v1/completions", prompt=["a", "b c"], n=2, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]
    assert answer["usage"]["completion_tokens"] == 16


async def test_streamed_choices_finish_each_and_end_once() -> None:
    """Streams of all choices interleave; one [DONE] ends them."""
    async with running() as live:
        events = await live.events("/v1/completions", prompt=[1, 2], n=3, max_tokens=5)
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    finished = [chunk["index"] for chunk in chunks if chunk["finish_reason"]]
    assert (sorted(finished), len(chunks), events[-1]) == ([0, 1, 2], 15, "[DONE]")


async def test_returned_token_ids_are_those_of_the_text() -> None:
    """`return_token_ids` gives prompt and answer as ids, streamed or not."""
    async with running() as live:
        fields = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}
        plain = (await live.post("/v1/completions", **fields))["choices"][0]
        events = await live.events("/v1/completions", **fields)
        text = await live.post("/detokenize", tokens=plain["token_ids"])
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert plain["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == [5, 6, 7]
    assert [chunk["token_ids"][0] for chunk in chunks] == plain["token_ids"]
    assert text["prompt"] == plain["text"]


async def test_continuous_usage_counts_up() -> None:
    """`continuous_usage_stats` puts running counts into every chunk."""
    async with running() as live:
        events = await live.events(
            "/v1/completions",
            prompt=[5] * 9,
            max_tokens=3,
            stream_options={"include_usage": False, "continuous_usage_stats": True},
        )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3]


async def test_stop_string_ends_the_stream_early() -> None:
    """The text stops before it, the reason says which it was."""
    async with running() as live:
        fields = {"prompt": [5, 6, 7], "max_tokens": 8}
        whole = (await live.post("/v1/completions", **fields))["choices"][0]["text"]
        stop = whole[9:13]
        plain = (await live.post("/v1/completions", stop=stop, **fields))["choices"][0]
        events = await live.events("/v1/completions", stop=stop, **fields)
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", stop)
    assert plain["text"] == whole[: whole.index(stop)]
    assert "".join(chunk["text"] for chunk in chunks) == plain["text"]


async def test_request_id_of_the_caller_is_in_the_answer() -> None:
    """X-Request-Id is honoured; a NUL in the body's own id breaks no stream."""
    async with running() as live:
        async with live.http.post(
            "/v1/completions",
            json={"prompt": [1], "max_tokens": 1},
            headers={"X-Request-Id": "mine"},
        ) as response:
            answer = await response.json()
        events = await live.events("/v1/completions", prompt=[1], max_tokens=3, request_id='\0"\0')
    assert answer["id"] == "cmpl-mine"
    assert {json.loads(event)["id"] for event in events[:-1]} == {'cmpl-\0"\0'}


@pytest.mark.parametrize(
    ("eviction", "told", "expected"),
    [
        ("lru", "header", 0),
        ("lfu", None, 48),
        ("workload_aware", "header", 48),
        ("workload_aware", "body", 48),
        ("workload_aware", "body, another in the header", 48),
        ("workload_aware", None, 0),
    ],
)
async def test_eviction_policy_decides_what_still_hits(
    eviction: str, told: str | None, expected: int
) -> None:
    """A prompt that came twice outlives a scan where uses count, or what its category is known for.

    The cache holds two prompts, and two others come before the first one comes again.
    """
    prompts = [list(range(start, start + 64)) for start in (100, 200, 300)]
    async with running(capacity_blocks=8, eviction=eviction) as live:
        for number in (0, 0, 1, 2, 0):
            category = "once" if number else "chat"
            body: dict[str, object] = {"prompt": prompts[number], "max_tokens": 1}
            headers = {}
            if told and "header" in told:
                headers["X-Timestable-Category"] = "any" if "body" in told else category
            if told and "body" in told:
                body["vllm_xargs"] = {"timestable_category": category}
            async with live.http.post("/v1/completions", json=body, headers=headers) as response:
                answer = await response.json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


async def test_eviction_policies_see_idle_time_pass() -> None:
    """Their clock is the virtual one, which an idle engine does not stop."""
    async with running(speedup=100.0, eviction="workload_aware") as live:
        order = live.engine.pool.order
        began_s = time.monotonic()  # before the engine is idle, which is before its answer is here
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
        began_virtual_s = order.now_s
        await asyncio.sleep(0.05)
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
        passed_s = time.monotonic() - began_s
        assert 4.5 <= order.now_s - began_virtual_s <= 100 * passed_s + 0.5
