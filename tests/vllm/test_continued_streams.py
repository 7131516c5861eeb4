"""A stream of one real engine, cut behind every event, goes on at the other as if nothing was."""

import json
from typing import Any

import aiohttp
import pytest

from indexer.contract.identifiers import InstanceId
from router.errors import UpstreamCause, UpstreamFailed
from router.instances.continuation import ContinuedStream
from router.requests.api_call import ApiCall, TextPrompt
from tests.vllm.fleet import RealFleet
from tests.vllm.settings import NAME

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300, func_only=True),
]

BROKEN = UpstreamFailed(InstanceId("a"), "", before_first_byte=False, cause=UpstreamCause.RESET)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The tower is tall. "},
    "characters of several tokens": {"prompt": "héllo wörld 你好 мир"},
    "repetition penalty": {"prompt": "a", "repetition_penalty": 1.7, "min_tokens": 20},
    "token ids": {"prompt": list(range(5, 60)), "repetition_penalty": 1.7, "ignore_eos": True},
}


class Client:
    """What has arrived."""

    def __init__(self) -> None:
        self.received = b""

    async def write(self, chunk: bytes) -> None:
        """Take it."""
        self.received += chunk


async def asked(session: aiohttp.ClientSession, engine_url: str, body: bytes) -> bytes:
    """A whole stream."""
    headers = {"Content-Type": "application/json"}
    url = f"{engine_url}/v1/completions"
    async with session.post(url, data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


def read(stream: bytes) -> tuple[str, str | None, tuple[int, int] | None, int]:
    """Text, end, tokens of prompt and output, and how many ids the answer has."""
    text, finish, tokens, names = "", None, None, set()
    for event in stream.split(b"\n\n")[:-1]:
        if event == b"data: [DONE]":
            continue
        value = json.loads(event.removeprefix(b"data: "))
        names.add((value["id"], value["created"]))
        if usage := value.get("usage"):
            tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in value["choices"]:
            text += choice["text"]
            finish = choice["finish_reason"] or finish
            assert choice["token_ids"] is None
    return text, finish, tokens, len(names)


async def continued(
    session: aiohttp.ClientSession, first_url: str, second_url: str, changes: dict[str, Any]
) -> int:
    """Cut behind each event in turn; how many of the cuts could be continued."""
    body = {"model": NAME, "stream": True, "temperature": 0, "max_tokens": 24} | changes
    body["stream_options"] = {"include_usage": True}
    call = ApiCall(
        path="/v1/completions",
        endpoint="/v1/completions",
        body=json.dumps(body).encode(),
        headers=(),
        request_id="r",
        model=NAME,
        stream=True,
        prompt=TextPrompt(texts=("",)),
    )
    whole = read(await asked(session, first_url, call.body))
    opened = ContinuedStream.of(call, Client())
    assert opened is not None
    answer = await asked(session, first_url, opened.next_call(InstanceId("a")).body)
    events = answer.split(b"\n\n")[:-1]
    count = 0
    for end in range(len(events)):
        client = Client()
        stream = ContinuedStream.of(call, client)
        assert stream is not None
        stream.next_call(InstanceId("a"))
        await stream.write(b"".join(event + b"\n\n" for event in events[:end]) + b'data: {"id')
        if not stream.continues_after(BROKEN):
            continue
        await stream.write(await asked(session, second_url, stream.next_call(InstanceId("b")).body))
        await stream.finish()
        assert read(client.received) == whole, end
        count += 1
    return count


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_goes_on_at_the_other_engine(fleet: RealFleet, case: str) -> None:
    """Same text, end and usage under one id, wherever it is cut before its end is told."""
    urls = [worker.url for worker in fleet.workers.values()]
    assert await continued(fleet.session, urls[0], urls[1], CASES[case]) >= 12
