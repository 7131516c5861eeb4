"""Answers of the completion endpoints in vLLM's JSON, collected until they are complete."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from workers.simulated.protocol import Generation
from workers.simulated.request import Request, unpack_tokens
from workers.simulated.text import TextModel

OUTPUT_TEXT = re.compile("[ a-z]+")
"""What answers consist of; no other stop string can occur in one."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every part of an answer repeats.

    Attributes:
        answer_id: `chatcmpl-...` or `cmpl-...`.
        created_s: wall clock, whole seconds.
        model: the name the caller asked for.
        chat: chat completion or text completion.
    """

    answer_id: str
    created_s: int
    model: str
    chat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPoint:
    """Where a stop string ends an answer.

    Attributes:
        output_tokens: tokens up to and including the one that completes the stop string.
        text_chars: characters of the answer that are sent.
        stop_text: the string that matched.
    """

    output_tokens: int
    text_chars: int
    stop_text: str


def find_stop(
    text_model: TextModel, call: Generation, *, seed: int, output_tokens: int
) -> StopPoint | None:
    """The earliest end by a stop string; an answer is known before it is generated."""
    stops = [stop for stop in call.stop if OUTPUT_TEXT.fullmatch(stop)]
    if not stops:
        return None
    text = ""
    tail_chars = max(map(len, stops))
    for position in range(output_tokens):
        piece = text_model.output_text(seed, position)
        searched_from = max(0, len(text) - tail_chars)
        text += piece
        found = [(at, stop) for stop in stops if (at := text.find(stop, searched_from)) >= 0]
        if found:
            at, stop = min(found)
            end = at + len(stop) if call.include_stop_text else at
            return StopPoint(output_tokens=position + 1, text_chars=end, stop_text=stop)
    return None


class Choice:
    """One answer to one prompt, as the engine makes progress with it (a `TokenSink`).

    Attributes:
        request: what the engine works on.
        index: number of the choice within the answer.
        hit_tokens: prompt tokens found resident; known once admitted.
        output_tokens: tokens generated so far.
    """

    def __init__(
        self, *, request: Request, index: int, stop: StopPoint | None, owner: "Answer"
    ) -> None:
        self.request = request
        self.index = index
        self.hit_tokens = 0
        self.output_tokens = 0
        self._stop = stop
        self._owner = owner
        self._chars_left = stop.text_chars if stop else 0

    @property
    def finish_reason(self) -> str:
        """`length`, or `stop` when a stop string ends it."""
        return "stop" if self._stop else "length"

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ends it."""
        return self._stop.stop_text if self._stop else None

    def admitted(self, hit_tokens: int) -> None:
        """The engine started with it."""
        self.hit_tokens = hit_tokens

    def token(self, position: int, *, last: bool) -> None:
        """The engine generated a token."""
        self.output_tokens = position + 1
        self._owner.token(self, position, last=last)

    def piece(self, position: int) -> bytes:
        """Text of a token as it is sent; called once per position, in order."""
        piece = self._owner.text_model.output_json(self.request.seed, position)
        if self._stop is not None:
            piece = piece[: self._chars_left]
            self._chars_left -= len(piece)
        return piece


class Answer:
    """All choices of one HTTP request; collects them until all are done."""

    def __init__(self, *, head: AnswerHead, call: Generation, text_model: TextModel) -> None:
        self.head = head
        self.call = call
        self.text_model = text_model
        self.choices: list[Choice] = []
        self.transfer_params: Mapping[str, object] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = 0

    def add_choice(self, request: Request, stop: StopPoint | None) -> Choice:
        """Another answer to wait for."""
        choice = Choice(request=request, index=len(self.choices), stop=stop, owner=self)
        self.choices.append(choice)
        self._unfinished += 1
        return choice

    def token(self, choice: Choice, position: int, *, last: bool) -> None:
        """A choice made progress."""
        del choice, position
        if last:
            self.finish_one()

    def finish_one(self) -> bool:
        """Count a finished choice; True for the last of them."""
        self._unfinished -= 1
        if self._unfinished:
            return False
        if not self.done.done():
            self.done.set_result(None)
        return True

    def usage(self) -> Json:
        """Token counts; cached tokens summed over prompts, each by its first choice."""
        first_of_prompt = self.choices[:: self.call.choice_count]
        prompt_tokens = sum(choice.request.prompt_tokens for choice in first_of_prompt)
        output_tokens = sum(choice.output_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.hit_tokens for choice in first_of_prompt)
            },
        }

    def body(self) -> Json:
        """The whole answer as one object, keys as vLLM sends them."""
        head, chat = self.head, self.head.chat
        body: Json = {
            "id": head.answer_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage(),
        }
        if chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = self.prompt_ids(self.choices[0])
        body["kv_transfer_params"] = self.transfer_params or None
        return body

    def _whole_choice(self, choice: Choice) -> Json:
        text = b"".join(choice.piece(i) for i in range(choice.output_tokens)).decode()
        output_ids = None
        if self.call.return_token_ids:
            seed, count = choice.request.seed, choice.output_tokens
            output_ids = [self.text_model.output_id(seed, position) for position in range(count)]
        whole: Json = {"index": choice.index}
        if self.head.chat:
            empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            whole["message"] = {"role": "assistant", "content": text, **empty}
        else:
            whole["text"] = text
        whole["logprobs"] = None
        whole["finish_reason"] = choice.finish_reason
        whole["stop_reason"] = choice.stop_reason
        whole["token_ids"] = output_ids
        if not self.head.chat:
            whole["prompt_logprobs"] = None
            whole["prompt_token_ids"] = self.prompt_ids(choice)
        return whole

    def prompt_ids(self, choice: Choice) -> list[int] | None:
        """The prompt's token ids, when the caller wants them."""
        if not self.call.return_token_ids:
            return None
        return unpack_tokens(choice.request.packed_prompt)


def dump_json(value: object) -> bytes:
    """Compact JSON, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
