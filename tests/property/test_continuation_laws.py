"""A stream that breaks any number of times anywhere reads as if it had never broken."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.contract.identifiers import InstanceId
from router.errors import UpstreamCause, UpstreamFailed
from router.instances.continuation import ContinuedStream
from router.requests.api_call import ApiCall, TextPrompt

PROMPT = [7, 11, 13]
TOKENS = 16
HALVES = {0, 4, 8, 12}
"""Of a character: they say nothing until another token completes it."""

END = 1


def next_token(sequence: list[int], seed: int) -> int:
    """A model: what comes depends on all that was before, and on nothing else."""
    return xxhash.xxh32_intdigest(json.dumps([seed, *sequence]).encode()) % TOKENS


def events(body: dict[str, Any], seed: int, answer_id: str, merges: int) -> Iterator[bytes]:
    """A streamed answer, as vLLM writes it; bits of `merges` say which tokens share an event."""
    prompt = PROMPT if body["prompt"] == "hello" else body["prompt"]
    names = {"id": answer_id, "object": "text_completion", "created": int(answer_id[5:])}
    sequence, told, text = list(prompt), [], ""
    # A decoder primed with half a character would begin with the whole prompt.
    pending = "".join(f"!{token}" for token in prompt) if prompt[-1] in HALVES else ""
    count, finish = 0, None
    while finish is None:
        token = next_token(sequence, seed)
        sequence.append(token)
        told.append(token)
        count += 1
        if token == END and count >= (body.get("min_tokens") or 0):
            finish = "stop"
        elif token not in HALVES:
            text += pending + ("é" if sequence[-2] in HALVES else "") + f" {token}"
            pending = ""
        if finish is None and count == body.get("max_tokens", 16):
            finish = "length"
        if merges >> count & 1 and finish is None:
            continue
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        choice |= {"prompt_token_ids": prompt if count == len(told) else None}
        choice |= {"token_ids": told if body.get("return_token_ids") else None}
        yield _event(names | {"choices": [choice]})
        told, text = [], ""
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        usage |= {"total_tokens": len(prompt) + count}
        usage |= {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}
        yield _event(names | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


@dataclass
class Client:
    """What has arrived."""

    received: bytes = b""

    async def write(self, chunk: bytes) -> None:
        """Take it."""
        self.received += chunk


@dataclass
class Read:
    """A stream, as a client makes sense of it."""

    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    names: set[tuple[str, int]] = field(default_factory=set)
    done: int = 0
    shown: list[int] = field(default_factory=list)
    prompts: int = 0

    @classmethod
    def of(cls, stream: bytes) -> "Read":
        """Parse it; every event has to be whole."""
        read = cls()
        assert stream.endswith(b"\n\n") or not stream
        for event in stream.split(b"\n\n")[:-1]:
            if event == b"data: [DONE]":
                read.done += 1
                continue
            value = json.loads(event.removeprefix(b"data: "))
            read.names.add((value["id"], value["created"]))
            read.usage = value.get("usage") or read.usage
            for choice in value["choices"]:
                read.text += choice["text"]
                read.finish = choice["finish_reason"] or read.finish
                read.shown += choice["token_ids"] or []
                read.prompts += choice["prompt_token_ids"] is not None
        return read


def call(body: dict[str, Any]) -> ApiCall:
    """A completion of this body."""
    return ApiCall(
        path="/v1/completions",
        endpoint="/v1/completions",
        body=json.dumps(body).encode(),
        headers=(),
        request_id="r",
        model="m",
        stream=True,
        prompt=TextPrompt(texts=("hello",)),
    )


def broken(number: int) -> UpstreamFailed:
    """How a stream ends that does not end."""
    cause = (UpstreamCause.RESET, UpstreamCause.TRUNCATED, UpstreamCause.IDLE_TIMEOUT)[number % 3]
    return UpstreamFailed(InstanceId("i"), "", before_first_byte=False, cause=cause)


async def served(
    body: dict[str, Any], seed: int, cuts: list[int], merges: int, piece: int
) -> tuple[bytes, bool]:
    """What the client gets of engines that break after so many bytes; whether it is all."""
    client = Client()
    stream = ContinuedStream.of(call(body), client)
    assert stream is not None
    for number, cut in enumerate([*cuts, 10**9]):
        asked = json.loads(stream.next_call(InstanceId("i")).body)
        answer = b"".join(events(asked, seed, f"cmpl-{number}", merges))
        sent = answer[:cut]
        for at in range(0, len(sent), piece):
            await stream.write(sent[at : at + piece])
        if len(sent) == len(answer):
            await stream.finish()
            return client.received, True
        if not stream.continues_after(broken(number)):
            return client.received, False
    raise AssertionError("the last engine does not break")


bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.just("hello"), "stream": st.just(True)},
    optional={
        "max_tokens": st.integers(1, 30),
        "min_tokens": st.integers(0, 5),
        "stream_options": st.just({"include_usage": True}),
        "return_token_ids": st.booleans(),
        "temperature": st.just(0),
    },
)
cuts_lists = st.lists(st.integers(0, 2500), max_size=5)


@settings(max_examples=120)
@given(
    body=bodies,
    seed=st.integers(0, 2**32),
    cuts=cuts_lists,
    merges=st.sampled_from([0, 0, 0b10010, 0b1100]) | st.integers(0, 2**20),
    piece=st.integers(1, 400),
)
def test_a_broken_stream_reads_as_a_whole_one(
    *, body: dict[str, Any], seed: int, cuts: list[int], merges: int, piece: int
) -> None:
    """Same text, end, usage and one id; or, where that cannot be, an exact beginning of it."""
    whole = Read.of(b"".join(events(body, seed, "cmpl-0", 0)))
    received, complete = asyncio.run(served(body, seed, cuts, merges, piece))
    read = Read.of(received)
    assert whole.text.startswith(read.text)
    assert len(read.names) <= 1
    if complete:
        assert (read.text, read.finish, read.done) == (whole.text, whole.finish, 1)
        assert (read.usage is None) == (whole.usage is None)
        if read.usage is not None and whole.usage is not None:
            details = read.usage.pop("prompt_tokens_details")
            whole.usage.pop("prompt_tokens_details")
            assert read.usage == whole.usage
            assert details["cached_tokens"] <= len(PROMPT)
    shows = bool(body.get("return_token_ids"))
    assert shows or not (read.shown or read.prompts)
    assert whole.shown[: len(read.shown)] == read.shown
    assert read.prompts <= 1


@settings(max_examples=50)
@given(body=bodies, seed=st.integers(0, 2**32), cuts=cuts_lists)
def test_single_tokens_with_text_can_always_be_continued(
    body: dict[str, Any], seed: int, cuts: list[int]
) -> None:
    """Until the end is told; ids that the client has seen are never taken back."""
    received, complete = asyncio.run(served(body, seed, cuts, 0, 10**6))
    read = Read.of(received)
    limit = body.get("max_tokens", 16)
    told_all = len(read.shown) >= limit or bool(body.get("return_token_ids"))
    assert complete or read.finish is not None or told_all


@pytest.mark.parametrize("seed", range(12))
def test_ids_that_a_client_has_seen_come_once(seed: int) -> None:
    """Wherever the stream is cut: tokens without text cannot be taken back from who sees ids."""
    body = {"model": "m", "prompt": "hello", "stream": True, "return_token_ids": True}
    answer = list(events(body, seed, "cmpl-0", 0))
    whole = Read.of(b"".join(answer))
    for end in range(len(answer)):
        cut = len(b"".join(answer[:end]))
        received, _ = asyncio.run(served(body, seed, [cut], 0, 10**6))
        shown = Read.of(received).shown
        assert shown == whole.shown[: len(shown)]


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"stop": ["x"]},
        {"seed": 1, "temperature": 1.0},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"echo": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"bad_words": ["x"]},
        {"a_field_of_tomorrow": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_depends_on_more_than_the_sequence_is_left_alone(changes: dict[str, Any]) -> None:
    """Also what this router has never heard of."""
    body = {"model": "m", "prompt": "hello", "stream": True} | changes
    assert ContinuedStream.of(call(body), Client()) is None


def test_chats_and_plain_answers_are_left_alone() -> None:
    """Their parsers have a state; and a plain answer has not begun before it is whole."""
    body = {"model": "m", "prompt": "hello"}
    one = call(body)
    for changes in ({"endpoint": "/v1/chat/completions"}, {"stream": False}, {"prompts_count": 2}):
        fields = {name: getattr(one, name) for name in one.__dataclass_fields__} | changes
        assert ContinuedStream.of(ApiCall(**fields), Client()) is None
