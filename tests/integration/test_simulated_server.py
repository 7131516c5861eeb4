"""The simulated engine's server over real HTTP: limits, errors, disconnects, small questions."""

import asyncio
import io
import time

import aiohttp
import pytest
from simulated_engine import MESSAGES, running
from waiting import until

from workers.simulated import stream

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("generated", [False, True])
async def test_disconnect_frees_the_blocks(*, stream: bool, generated: bool) -> None:
    """A client that leaves, during prefill or later, leaves nothing behind."""
    async with running(speedup=0.2 if not generated else 5.0) as live:
        fields = {"prompt": [7] * 500, "max_tokens": 5000, "stream": stream}
        call = asyncio.ensure_future(live.http.post("/v1/completions", json=fields))
        await until(lambda: live.engine.pool.used_count > 0, "the request holds blocks")
        if generated:
            await until(lambda: live.engine.totals.generated_tokens > 3, "tokens are generated")
        call.cancel()
        if call.done() and not call.cancelled():
            call.result().close()
        await until(lambda: live.engine.pool.used_count == 0, "the blocks are free")
        await until(lambda: live.engine.running_count == 0, "nothing runs")
        async with live.http.get("/metrics") as response:
            text = await response.text()
    assert 'finished_reason="abort"} 1.0' in text


async def test_full_queue_is_pushed_back_with_503() -> None:
    """A healthy engine refuses what it could only queue, before any byte of an answer."""
    async with running(speedup=0.1, max_num_queued_reqs=1, max_num_seqs=1) as live:
        fields = {"prompt": [7] * 50, "max_tokens": 50}
        calls = [asyncio.ensure_future(live.http.post("/v1/completions", json=fields))]
        await until(lambda: live.engine.running_count == 1, "one runs")
        calls.append(asyncio.ensure_future(live.http.post("/v1/completions", json=fields)))
        await until(lambda: live.engine.waiting_count == 1, "one waits")
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


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "novel"])
async def test_body_that_is_compressed_or_claims_to_be_is_a_400(encoding: str) -> None:
    """As in vLLM nothing is decompressed; the bytes are no JSON, and the answer says so."""
    headers = {"Content-Encoding": encoding}
    async with (
        running() as live,
        live.http.post("/v1/completions", data=b"\x1f\x8b\x08 broken", headers=headers) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, set(error)) == (400, {"message", "type", "param", "code"})
    assert "JSON decode error" in error["message"]


async def test_headers_up_to_64_kb_are_taken() -> None:
    """What a router lets through must not fail here."""
    headers = {"X-Long": "x" * 60_000}
    async with running() as live, live.http.get("/health", headers=headers) as response:
        assert response.status == 200


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
        await until(lambda: live.engine.pool.used_count == 0, "the blocks are free")


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
