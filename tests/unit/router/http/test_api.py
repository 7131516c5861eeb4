"""Every failure has an answer, in OpenAI's shape, that says what to change."""

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from builders import make_instance, make_snapshot

from router.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    Draining,
    DropReason,
    IndexUnavailable,
    ModelUnknown,
    NoEligibleInstance,
    Overloaded,
    RequestInvalid,
    RouterError,
    UpstreamCause,
    UpstreamFailed,
)
from router.http.client_exchange import CANDIDATES_SHOWN_MAX, decision_view
from router.http.failures import STATUS, make_app
from router.snapshot import Decision

INSTANCE = make_instance().instance_id


async def answer_to(error: BaseException) -> tuple[int, Any, dict[str, Any]]:
    """(status, headers, body) a client gets when a handler raises."""

    async def handler(_: web.Request) -> web.StreamResponse:
        raise error

    app = make_app([web.get("/x", handler)])
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(server.make_url("/"), headers={"x-request-id": "r"}) as client,
        client.get("/x") as answer,
    ):
        return answer.status, answer.headers, await answer.json()


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (RequestInvalid("n: bad", param="n"), 400, "invalid_request_error", None),
        (ModelUnknown("z", ["m"]), 404, "not_found_error", None),
        (BodyTooSlow(1.0), 408, "invalid_request_error", None),
        (BodyTooLarge(10), 413, "invalid_request_error", None),
        (Overloaded("full"), 429, "rate_limit_error", "1"),
        (Draining("stopping"), 503, "server_error", "1"),
        (NoEligibleInstance("none"), 503, "server_error", "2"),
        (IndexUnavailable("none"), 503, "server_error", "2"),
        (UpstreamFailed(INSTANCE, "x", before_first_byte=True), 502, "server_error", "1"),
        (
            UpstreamFailed(
                INSTANCE,
                "x",
                before_first_byte=True,
                cause=UpstreamCause.FIRST_BYTE_TIMEOUT,
            ),
            504,
            "server_error",
            "1",
        ),
    ],
)
async def test_each_error_has_its_status(
    *, error: RouterError, status: int, kind: str, retry_after: str | None
) -> None:
    """Status, shape, reason, id and when to come back."""
    found, headers, body = await answer_to(error)
    assert found == status
    assert body["error"] == {
        "message": str(error),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": error.reason,
    }
    assert headers["x-timestable-reason"] == error.reason
    assert headers["x-request-id"] == "r"
    assert headers.get("Retry-After") == retry_after


def test_every_reason_has_a_status() -> None:
    """A client is never left without one."""
    assert set(DropReason) == set(STATUS)
    assert STATUS[ClientGone.reason] == 499


async def test_a_defect_is_a_500_without_a_trace() -> None:
    """The client learns nothing about the inside."""
    status, headers, body = await answer_to(ZeroDivisionError("secret"))
    assert (status, headers["x-timestable-reason"]) == (500, "internal-error")
    assert "secret" not in json.dumps(body)


def make_decision(count: int) -> Decision:
    """Everybody idle; the last one has a block."""
    snapshot = make_snapshot(
        100, hit_tokens=[0] * (count - 1) + [16], names=[f"i{n}" for n in range(count)]
    )
    scores = snapshot.new_prefill_tokens.astype(float)
    return Decision(
        policy="lmetric",
        snapshot=snapshot,
        scores=scores,
        index=int(np.argmin(scores)),
    )


def test_a_decision_says_who_and_why() -> None:
    """Every term of the score, ready for JSON."""
    view = json.loads(json.dumps(decision_view(make_decision(2), candidates_max=None)))
    assert (view["instance"], view["url"]) == ("i1", "http://i1:8000")
    assert (view["prompt_tokens"], view["hit_tokens"], view["score"]) == (100, 16, 84.0)
    assert [one["instance_id"] for one in view["candidates"]] == ["i1", "i0"]


def test_a_decision_in_a_header_is_bounded() -> None:
    """A large fleet shows its best candidates, and fits."""
    view = decision_view(make_decision(500), candidates_max=CANDIDATES_SHOWN_MAX)
    assert len(view["candidates"]) == 8
    assert len(json.dumps(view)) < 4096
