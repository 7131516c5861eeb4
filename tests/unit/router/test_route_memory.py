"""A policy that remembers is told of every decision of its router, and of its end."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from route_parts import FakeParts, failure, make_call

from router.errors import UpstreamFailed
from router.policies.base import Remembering
from router.policies.max_hit import MaxHit
from router.request_record import RequestRecord
from router.requests.api_call import Cost
from router.snapshot import Decision, RequestView


@dataclass
class Heard:
    """A memory that keeps everything, in order."""

    decisions: list[str] = field(default_factory=list)
    ends: list[tuple[str, bool]] = field(default_factory=list)

    def decided(self, request: RequestView, decision: Decision) -> None:
        """Note it."""
        assert request.request_id
        self.decisions.append(decision.instance.instance_id)

    def ended(self, request: RequestView, decision: Decision, decode_s: float | None) -> None:
        """Note it, and whether it decoded for a known time."""
        assert request.request_id
        self.ends.append((decision.instance.instance_id, decode_s is not None and decode_s > 0))


def options(memory: Heard) -> dict[str, Any]:
    """Of a router whose policy has this memory."""
    policy = Remembering(name="heard", memory=memory, score=MaxHit())
    return {"policies": {"heard": policy}, "default_policy": "heard"}


async def heard(parts: FakeParts) -> Heard:
    """What a memory hears of one request."""
    memory = Heard()
    await parts.routed(**options(memory))
    return memory


async def test_a_stream_tells_how_long_it_decoded() -> None:
    """From its first byte; its release tells the end again."""
    memory = await heard(FakeParts())
    assert (memory.decisions, memory.ends) == (["a"], [("a", True), ("a", False)])


async def test_a_plain_answer_tells_its_end_only() -> None:
    """Nobody knows when its first token came."""
    memory = await heard(FakeParts(call=make_call(stream=False)))
    assert (memory.decisions, memory.ends) == (["a"], [("a", False)])


async def test_every_attempt_is_told() -> None:
    """The instance that failed, and the one that was asked then."""
    parts = FakeParts(failures={"a": failure("a")})
    memory = await heard(parts)
    first, second = parts.asked
    assert memory.decisions == [first, second]
    assert memory.ends == [(first, False), (second, True), (second, False)]


async def test_a_request_that_fails_has_ended_too() -> None:
    """Nothing is remembered as if it were still there."""
    parts, memory = FakeParts(names=("a",), failures={"a": failure("a")}), Heard()
    with pytest.raises(UpstreamFailed):
        await parts.routed(**options(memory))
    assert (memory.decisions, memory.ends) == (["a"], [("a", False)])


async def test_what_costs_nothing_is_no_work() -> None:
    """A count of tokens, for one, is not remembered as load."""
    parts, memory = FakeParts(call=make_call(cost=Cost.NONE)), Heard()
    await parts.router(**options(memory)).route(parts, RequestRecord(request_id="r", accepted_s=0))
    assert (parts.asked, memory.decisions) == (["a"], [])
