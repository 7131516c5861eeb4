"""The simulated engine over real HTTP."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from workers.config import SimulateConfig
from workers.simulated import stream
from workers.simulated.engine import Engine
from workers.simulated.run import build

pytestmark = pytest.mark.integration

DEADLINE_S = 20.0
MESSAGES = [{"role": "user", "content": "Tell me about blocks, tails and trees. " * 10}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running instance and a client for it."""

    engine: Engine
    http: aiohttp.ClientSession

    async def post(self, path: str, **fields: object) -> dict[str, Any]:
        """A request that must succeed."""
        async with self.http.post(path, json=fields) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def events(self, path: str, **fields: object) -> list[str]:
        """The data of all server-sent events of a streamed request."""
        async with self.http.post(path, json={**fields, "stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await response.text()
        assert text.endswith("\n\n")
        return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Live]:
    """An instance in this process; 50 virtual seconds pass in a real one."""
    defaults: dict[str, Any] = {
        "port": 0,
        "speedup": 50.0,
        "capacity_blocks": 2000,
        "event_endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
    }
    parts = build(SimulateConfig(**{**defaults, **options}))
    runner = web.AppRunner(parts.server.app(), handler_cancellation=True)
    await runner.setup()
    async with AsyncExitStack() as stack:
        stack.callback(parts.publisher.close if parts.publisher else lambda: None)
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        task = asyncio.ensure_future(parts.runtime.run())
        stack.callback(task.cancel)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        async with asyncio.timeout(DEADLINE_S):
            yield Live(engine=parts.runtime.engine, http=http)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the deadline is that of `running`."""
    while not condition():  # noqa: ASYNC110  # the engine has no event to wait for
        await asyncio.sleep(0.002)


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("generated", [False, True])
async def test_disconnect_frees_the_blocks(*, stream: bool, generated: bool) -> None:
    """A client that leaves, during prefill or later, leaves nothing behind."""
    async with running(speedup=0.2 if not generated else 5.0) as live:
        fields = {"prompt": [7] * 500, "max_tokens": 5000, "stream": stream}
        call = asyncio.ensure_future(live.http.post("/v1/completions", json=fields))
        await until(lambda: live.engine.pool.used_count > 0)
        if generated:
            await until(lambda: live.engine.totals.generated_tokens > 3)
        call.cancel()
        if call.done() and not call.cancelled():
            call.result().close()
        await until(lambda: live.engine.pool.used_count == 0)
        await until(lambda: live.engine.running_count == 0)
        async with live.http.get("/metrics") as response:
            text = await response.text()
    assert 'finished_reason="abort"} 1.0' in text


async def test_full_queue_is_pushed_back_with_503() -> None:
    """A healthy engine refuses what it could only queue, before any byte of an answer."""
    async with running(speedup=0.1, max_num_queued_reqs=1, max_num_seqs=1) as live:
        fields = {"prompt": [7] * 50, "max_tokens": 50}
        calls = [asyncio.ensure_future(live.http.post("/v1/completions", json=fields))]
        await until(lambda: live.engine.running_count == 1)
        calls.append(asyncio.ensure_future(live.http.post("/v1/completions", json=fields)))
        await until(lambda: live.engine.waiting_count == 1)
        async with live.http.post("/v1/completions", json={**fields, "stream": True}) as refused:
            error = (await refused.json())["error"]
        for call in calls:
            call.cancel()
    assert (refused.status, error["code"]) == (503, 503)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "JSON decode error"),
        ("/v1/completions", b'{"prompt":"x","model":"other"}', 404, "`other` does not exist"),
        ("/v1/completions", b'{"prompt":[4096]}', 400, "out of vocabulary"),
        ("/v1/completions", b'{"prompt":"\\ud800"}', 400, "not valid Unicode"),
        ("/v1/completions", b'{"prompt":[1],"max_tokens":64}', 400, "maximum input length of 0"),
        ("/v1/chat/completions", b'{"messages":[]}', 400, "at least one message"),
        ("/tokenize", b"{}", 400, "Field required"),
        ("/detokenize", b'{"tokens":[4096]}', 400, "out of vocabulary"),
        ("/nowhere", b"{}", 404, "Not Found"),
        ("/health", b"{}", 405, "Method Not Allowed"),
    ],
)
async def test_errors_have_vllms_shape(path: str, body: bytes, status: int, words: str) -> None:
    """Every refusal is `{"error": {message, type, param, code}}` with the code of its status."""
    async with (
        running(max_model_len_tokens=64) as live,
        live.http.post(path, data=body) as response,
    ):
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status, error["code"]) == (status, status)
    assert words in error["message"]


async def test_body_over_the_limit_is_a_413() -> None:
    """Sixteen MiB are the most."""
    body = io.BytesIO(b" " * ((16 << 20) + 1))
    async with running() as live, live.http.post("/v1/completions", data=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (413, 413)


async def test_api_key_protects_v1_only() -> None:
    """/v1/* wants the bearer token; health and metrics stay open."""
    statuses = []
    async with running(api_key="sesame") as live:
        for path, token in (
            ("/v1/models", None),
            ("/v1/models", "Bearer wrong"),
            ("/v1/models", "Bearer sesame"),
            ("/health", None),
            ("/metrics", None),
        ):
            headers = {"Authorization": token} if token else {}
            async with live.http.get(path, headers=headers) as response:
                statuses.append(response.status)
    assert statuses == [401, 401, 200, 200, 200]


async def test_adapters_are_served_beside_their_base() -> None:
    """/v1/models tells root, parent and context; an adapter has a cache of its own."""
    async with running(adapter_names=("poet",)) as live:
        async with live.http.get("/v1/models") as response:
            base, adapter = (await response.json())["data"]
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
        answer = await live.post("/v1/completions", model="poet", prompt=[9] * 40, max_tokens=1)
    assert base["root"].endswith("workers/simulated/tokenizer")
    assert (base["max_model_len"], adapter["parent"]) == (32_000, "sim")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tokenize_counts_what_usage_counts() -> None:
    """Prompt tokens of a chat are those /tokenize announces."""
    async with running() as live:
        tokens = await live.post("/tokenize", messages=MESSAGES)
        answer = await live.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_virtual_time_follows_the_timetable() -> None:
    """The real duration of a request is its virtual one over the speed-up, without drift."""
    async with running(speedup=4.0) as live:
        started_s = time.monotonic()
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=100)
        elapsed_s = time.monotonic() - started_s
        virtual_s = live.engine.totals.busy_s
    assert elapsed_s == pytest.approx(virtual_s / 4.0, rel=0.5, abs=0.1)


async def test_http_1_0_client_gets_a_body_without_chunks() -> None:
    """A client that cannot read chunked encoding gets the plain events."""
    async with running() as live:
        base = live.http._base_url
        assert base is not None
        reader, writer = await asyncio.open_connection(base.host, base.port)
        body = b'{"prompt":[1],"max_tokens":2,"stream":true}'
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        answer = await reader.read()
        writer.close()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert (events[:6], events[-14:]) == (b"data: ", b"data: [DONE]\n\n")


async def test_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsent bytes are bounded: past the limit the connection goes and so does the request."""
    monkeypatch.setattr(stream, "UNSENT_BYTES_MAX", -1)
    async with running() as live:
        fields = {"prompt": [7] * 50, "max_tokens": 5000, "stream": True}
        with pytest.raises(aiohttp.ClientError):
            async with live.http.post("/v1/completions", json=fields) as response:
                await response.read()
        await until(lambda: live.engine.pool.used_count == 0)


async def test_engine_tells_where_its_events_are() -> None:
    """/kv_event_sources is a map by rank; ports taken by wildcard are the real ones."""
    async with running(event_topic="kv") as live, live.http.get("/kv_event_sources") as response:
        sources = await response.json()
    assert list(sources) == ["0"]
    source = sources["0"]
    assert (source["enable_kv_cache_events"], source["publisher"]) == (True, "zmq")
    assert (source["topic"], source["buffer_steps"]) == ("kv", 10_000)
    assert "*" not in source["endpoint"] + source["replay_endpoint"]


async def test_engine_without_events_names_no_source() -> None:
    """Events can be off."""
    async with running(event_endpoint=None) as live, live.http.get("/kv_event_sources") as response:
        assert await response.json() == {}


async def test_reset_empties_the_cache() -> None:
    """After /reset_prefix_cache nothing is hit."""
    async with running() as live:
        await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
        async with live.http.post("/reset_prefix_cache") as response:
            assert response.status == 200
        answer = await live.post("/v1/completions", prompt=[9] * 40, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/version", {"version": "0.32.0"}),
        ("/load", {"server_load": 0}),
        ("/is_sleeping", {"is_sleeping": False}),
    ],
)
async def test_small_questions_have_vllms_answers(path: str, expected: dict[str, object]) -> None:
    """What a router or an operator asks about the instance."""
    async with running() as live, live.http.get(path) as response:
        assert await response.json() == expected
