"""Web pages as clients: what their browsers are told."""

from typing import Any

import pytest
from aiohttp import web
from router_edge import FakeEngine, completion, edge, plain, stream_all

pytestmark = pytest.mark.integration

PAGE = "https://chat.example"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def asked(client: Any, method: str, path: str, origin: str, **more: Any) -> tuple[int, Any]:
    """Status and headers."""
    headers = {"Origin": origin, **more.pop("headers", {})}
    async with client.request(method, path, headers=headers, **more) as answer:
        await answer.read()
        return answer.status, answer.headers


async def told_by_engine(_: FakeEngine, __: web.Request) -> web.StreamResponse:
    """As vLLM does, and more."""
    headers = {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Credentials": "true",
        "Vary": "Accept-Encoding",
    }
    return web.json_response({"usage": {}}, headers=headers)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/unknown"])
async def test_a_browser_may_ask_beforehand_without_a_key(redis_client, redis_socket, path) -> None:
    """No engine is asked for that; pages of other origins are refused."""
    options = {"api_keys": "a-key", "allowed_origins": (PAGE,)}
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, **options) as one:
        status, told = await asked(one.client, "OPTIONS", path, PAGE, headers=ASKS)
        assert (status, told["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert told["Access-Control-Allow-Headers"] == ASKS["Access-Control-Request-Headers"]
        assert "POST" in told["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in told
        status, told = await asked(one.client, "OPTIONS", path, PAGE + ".evil", headers=ASKS)
        assert (status, told.get("Access-Control-Allow-Origin")) == (403, None)
    assert engine.bodies == []


@pytest.mark.parametrize("script", [plain, stream_all], ids=["plain", "streamed"])
async def test_answers_and_refusals_are_for_the_page(redis_client, redis_socket, script) -> None:
    """It sees why it was refused, and what the router says beside an answer."""
    engine = FakeEngine("a", script)
    options = {"api_keys": "a-key", "allowed_origins": (PAGE,)}
    async with edge(redis_client, redis_socket, engine, **options) as one:
        for headers, expected in (({}, 401), ({"Authorization": "Bearer a-key"}, 200)):
            for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
                status, told = await asked(
                    one.client,
                    "POST",
                    "/v1/completions",
                    origin,
                    json=completion(),
                    headers=headers,
                )
                assert (status, told.get("Access-Control-Allow-Origin")) == (expected, allowed)
                assert told["Vary"] == "Origin"
        assert (
            "x-timestable-instance" in told.get("Access-Control-Expose-Headers", "") or not allowed
        )


async def test_what_is_the_operators_is_for_no_page(redis_client, redis_socket) -> None:
    """Even where all origins may ask."""
    async with edge(redis_client, redis_socket, allowed_origins=("*",)) as one:
        _, told = await asked(one.client, "GET", "/v1/models", PAGE)
        assert told["Access-Control-Allow-Origin"] == "*"
        for path in ("/fleet", "/metrics", "/decisions", "/admin/state", "/dashboard"):
            status, told = await asked(one.client, "OPTIONS", path, PAGE, headers=ASKS)
            assert (status >= 400, told.get("Access-Control-Allow-Origin")) == (True, None)
            _, told = await asked(one.client, "GET", path, PAGE)
            assert "Access-Control-Allow-Origin" not in told


@pytest.mark.parametrize(
    ("origins", "origin", "expected"),
    [((), PAGE, "*"), ((PAGE,), PAGE, PAGE), ((PAGE,), "https://other.example", None)],
)
async def test_an_engines_word_goes_on_or_is_replaced(
    redis_client, redis_socket, origins, origin, expected
) -> None:
    """Never both, which a browser refuses; nor does it let in whom the operator does not."""
    engine = FakeEngine("a", told_by_engine)
    async with edge(redis_client, redis_socket, engine, allowed_origins=origins) as one:
        _, told = await asked(one.client, "POST", "/v1/completions", origin, json=completion())
    assert told.getall("Access-Control-Allow-Origin", []) == ([expected] if expected else [])
    assert told.get("Access-Control-Allow-Credentials") == (None if origins else "true")
    assert told.getall("Vary") == ["Accept-Encoding", *(["Origin"] if origins else [])]
