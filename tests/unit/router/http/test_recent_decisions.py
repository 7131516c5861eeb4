"""The ring of decisions: what it keeps, what it shows, what it costs at most."""

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from builders import make_snapshot

from router.http.dashboard import recent_decisions
from router.http.dashboard.recent_decisions import (
    CANDIDATES_SHOWN_MAX,
    KEPT_MAX,
    SCORES_KEPT_MAX,
    SHOWN_MAX,
    RecentDecisions,
)
from router.http.dashboard.routes import Dashboard
from router.http.failures import make_app
from router.request_record import RequestRecord
from router.snapshot import Decision


def decision(count: int = 2, **changes: Any) -> Decision:
    """Among so many idle instances the first."""
    snapshot = make_snapshot(
        100, hit_tokens=[16] + [0] * (count - 1), names=[f"i{n}:1/0#x" for n in range(count)]
    )
    values = {"scores": snapshot.new_prefill_tokens.astype(float), "index": 0} | changes
    return Decision(policy="lmetric", snapshot=snapshot, **values)


def told(ring: RecentDecisions, request_id: str, *decisions: Decision) -> RequestRecord:
    """A request of which these decisions were made, as the flow notes them."""
    record = RequestRecord(request_id=request_id, accepted_s=0.0, on_decision=ring.add)
    for one in decisions:
        record.note(one)
    return record


def shown(view: dict[str, Any], key: str) -> list[Any]:
    """One field of every decision shown, as JSON carries it."""
    return [one[key] for one in json.loads(json.dumps(view, allow_nan=False))["decisions"]]


def test_the_newest_come_first_and_old_ones_go() -> None:
    """The ring is bounded, and so is a list."""
    ring = RecentDecisions()
    for number in range(KEPT_MAX + 5):
        told(ring, f"r{number}", decision())
    view = ring.newest()
    assert (view["kept"], len(view["decisions"])) == (KEPT_MAX, SHOWN_MAX)
    assert shown(view, "request_id")[:2] == [f"r{KEPT_MAX + 4}", f"r{KEPT_MAX + 3}"]
    assert ring.of_request("r4")["decisions"] == []
    assert len(ring.of_request("r5")["decisions"]) == 1


def test_a_large_fleet_keeps_fewer_requests() -> None:
    """Memory is bounded by the scores that are kept, retries included."""
    ring = RecentDecisions()
    large = decision(1024)
    for number in range(200):
        told(ring, f"r{number}", large, large)
    kept = ring.newest()["kept"]
    assert kept * 2 * 1024 <= SCORES_KEPT_MAX
    assert kept == SCORES_KEPT_MAX // 2048


def test_what_became_of_a_request_is_read_when_somebody_looks() -> None:
    """Running until its end; then its outcome, its times and what the engine reported."""
    ring = RecentDecisions(clock=lambda: 5.0)
    record = told(ring, "r", decision())
    assert shown(ring.newest(), "outcome") == ["running"]
    record.outcome, record.status, record.e2e_s, record.cached_tokens = "completed", 200, 1.5, 16
    one = ring.newest()["decisions"][0]
    assert [one[k] for k in ("outcome", "status", "e2e_s", "cached_tokens", "at_s")] == [
        *("completed", 200, 1.5, 16, 5.0)
    ]


def test_a_retry_shows_every_attempt() -> None:
    """One request in the list, by its last attempt; each attempt with its candidates."""
    ring = RecentDecisions()
    told(ring, "r", decision(), decision(index=1))
    assert (shown(ring.newest(), "attempts_count"), shown(ring.newest(), "instance_id")) == (
        *([2], ["i1:1/0#x"]),
    )
    (attempts,) = shown(ring.of_request("r"), "attempts")
    assert [one["candidates"][0]["instance_id"] for one in attempts] == ["i0:1/0#x", "i1:1/0#x"]
    assert attempts[0]["explanation"].startswith("i0:1/0 had the lowest score of 2 instances")


def test_candidates_are_bounded_and_never_is_null() -> None:
    """The chosen one and the best others; JSON has no infinity."""
    ring = RecentDecisions()
    told(ring, "r", decision(500, scores=np.full(500, np.inf)))
    (attempts,) = shown(ring.of_request("r"), "attempts")
    assert len(attempts[0]["candidates"]) == CANDIDATES_SHOWN_MAX
    assert (attempts[0]["candidates_count"], attempts[0]["candidates"][0]["score"]) == (500, None)


def test_an_id_used_again_and_again_is_shown_a_few_times() -> None:
    """Clients choose their ids; an answer stays small."""
    ring = RecentDecisions()
    for _ in range(20):
        told(ring, "same", decision())
    assert len(ring.of_request("same")["decisions"]) == recent_decisions.DETAILED_MAX


async def fetch(path: str) -> tuple[int, Any, str]:
    """(status, headers, body) of a path of the page."""
    dashboard = Dashboard(RecentDecisions())
    app = make_app([*dashboard.data_routes(), *dashboard.page_routes()])
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(server.make_url("/")) as client,
        client.get(path) as answer,
    ):
        return answer.status, answer.headers, await answer.text()


async def test_the_page_allows_itself_nothing_from_elsewhere() -> None:
    """No foreign address in any file, and a policy that would block one."""
    _, headers, page = await fetch("/dashboard")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http" not in page.replace("http-equiv", "")
    for name in ("main.js", "api.js", "dom.js", "fleet.js", "decisions.js", "dashboard.css"):
        status, headers, text = await fetch(f"/dashboard/{name}")
        assert status == 200
        assert headers["Content-Security-Policy"] == policy
        assert "innerHTML" not in text
        assert "//" not in text.replace("// ", "").replace("http://HOST", "").replace(
            "redis://HOST", ""
        )


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes.py", "%2e%2e%2f%2e%2e%2fapi.py"])
async def test_only_the_page_is_served(name: str) -> None:
    """No file of the program can be asked for."""
    status, _, _ = await fetch(f"/dashboard/{name}")
    assert status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "x", "101", "9" * 5000, "0" * 8 + "9" * 5000, "²"])
async def test_a_bad_limit_says_what_to_use(limit: str) -> None:
    """A refusal, not a crash."""
    status, _, body = await fetch(f"/decisions?limit={limit}")
    assert (status, json.loads(body)["error"]["message"]) == (
        400,
        "limit: use a whole number from 1 to 100.",
    )
