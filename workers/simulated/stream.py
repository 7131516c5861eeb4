"""Streamed answers: server-sent events in vLLM's shape.

A token is written to the connection from inside the engine's task, with one call and from
prebuilt bytes: waking the request's handler for each token would cost several times as much.
"""

import asyncio

from workers.simulated.answer import Answer, AnswerHead, Choice, Json, dump_json
from workers.simulated.protocol import Generation
from workers.simulated.text import TextModel

UNSENT_BYTES_MAX = 4 << 20
"""A client that lets this much pile up is disconnected."""

DONE = b"data: [DONE]\n\n"


class StreamedAnswer(Answer):
    """Sends each token as a server-sent event, in one write together with what goes with it."""

    def __init__(self, *, head: AnswerHead, call: Generation, text_model: TextModel) -> None:
        super().__init__(head=head, call=call, text_model=text_model)
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = True
        self._shells: list[tuple[bytes, bytes]] = []
        self._plain = not (call.return_token_ids or call.continuous_usage)

    def start(self, transport: asyncio.WriteTransport | None, *, chunked: bool) -> None:
        """The response's headers are out; tokens go to this connection from now on.

        Args:
            transport: the connection; None when it is gone already.
            chunked: the body has chunked transfer encoding (not so for HTTP/1.0 clients).
        """
        self._transport = transport
        self._chunked = chunked
        for choice in self.choices:
            event = self._event([self._fields(choice, "\0")])
            before, after = event.rsplit(dump_json("\0")[1:-1], 1)
            self._shells.append((before, after))

    def fail(self, body: Json) -> None:
        """End with an error; the status has been sent already."""
        self._write(b"data: " + dump_json(body) + b"\n\n" + DONE)
        self.done.set_result(None)

    def token(self, choice: Choice, position: int, *, last: bool) -> None:
        """Send one token."""
        if last or not position or not self._plain:
            self._write(self._edge_events(choice, position, last=last))
            return
        before, after = self._shells[choice.index]
        self._write(before + choice.piece(position) + after)

    def _edge_events(self, choice: Choice, position: int, *, last: bool) -> bytes:
        """The first, the last, or an unusual token with the events before and after it."""
        events = b""
        if not position and self.head.chat:
            events = self._opening(choice)
        text = choice.piece(position).decode()
        fields = self._fields(choice, text, position=position, last=last)
        usage = {"usage": self._usage_so_far(choice)} if self.call.continuous_usage else {}
        events += self._event([fields], **usage)
        if last and self.finish_one():
            if self.call.include_usage:
                events += self._event([], usage=self.usage())
            events += DONE
        return events

    def _opening(self, choice: Choice) -> bytes:
        """The event with the role, before the first token of a chat answer."""
        fields: Json = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
        fields |= {"logprobs": None, "finish_reason": None}
        return self._event([fields], prompt_token_ids=self.prompt_ids(choice))

    def _fields(
        self, choice: Choice, text: str, *, position: int | None = None, last: bool = False
    ) -> Json:
        """One token's entry in `choices`; without a position, as for any token in between."""
        chat = self.head.chat
        fields: Json = {"index": choice.index}
        fields |= {"delta": {"content": text}} if chat else {"text": text}
        fields |= {"logprobs": None, "finish_reason": choice.finish_reason if last else None}
        if last or not chat:
            fields["stop_reason"] = choice.stop_reason if last else None
        if not chat:
            fields["prompt_token_ids"] = self.prompt_ids(choice) if position == 0 else None
        fields["token_ids"] = None
        if position is not None and self.call.return_token_ids:
            fields["token_ids"] = [self.text_model.output_id(choice.request.seed, position)]
        return fields

    def _usage_so_far(self, choice: Choice) -> Json:
        prompt_tokens, output_tokens = choice.request.prompt_tokens, choice.output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }

    def _event(self, choices: list[Json], **more: object) -> bytes:
        head = self.head
        event = {
            "id": head.answer_id,
            "object": "chat.completion.chunk" if head.chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
            "choices": choices,
            **more,
        }
        return b"data: " + dump_json(event) + b"\n\n"

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        transport.write(events)
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            transport.abort()
