"""The live page in a real Chromium, in front of a real router: what a person sees and can do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from browser.chromium import Chromium, Tab
from browser.seen import faint_texts, nameless, overflow_pixels, roles
from fleets import chain, store
from router_edge import (
    PROMPT,
    Edge,
    FakeEngine,
    completion,
    edge,
    edge_without_redis,
    hang_up,
    silent,
    stream_all,
)
from waiting import until

pytestmark = pytest.mark.browser

SHOTS = Path(__file__).parents[2] / "build" / "browser"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
HOSTILE = "<img/src=x/onerror=document.title='owned'>"

MANY = """
(async () => {
  const view = await (await fetch('/fleet')).json();
  const { showFleets } = await import('/dashboard/fleet.js');
  const [one] = view.fleets[0].instances;
  const ejection = { cause: 'connect', until_s: view.router.now_s + 11.5 };
  view.fleets[0].instances = [...Array(40).keys()].map((n) => ({
    ...one, ejection: n === 3 ? ejection : null,
    instance_id: `engine-of-a-long-name-${n}.namespace.svc.cluster.local:8000/0#x`,
  }));
  showFleets(document.getElementById('fleets'), view);
})()
"""
"""Draws the fleet that is there as one of 40 instances."""


def page_of(client: aiohttp.ClientSession) -> str:
    """Where the page of a router is."""
    return str(client._build_url("/dashboard"))


async def send(one: Edge, request_id: str, **changes: Any) -> None:
    """A whole request."""
    headers = {"x-request-id": request_id}
    async with one.client.post(
        "/v1/completions", json=completion(**changes), headers=headers
    ) as answer:
        await answer.read()


async def is_sound(tab: Tab, origin: str) -> None:
    """Nothing failed, nothing from elsewhere, nothing beside the window, nothing hard to read."""
    assert tab.problems == []
    assert [url for url in tab.requested if not url.startswith(origin)] == []
    assert await overflow_pixels(tab) == 0
    assert await faint_texts(tab) == []
    assert await nameless(tab) == []


@asynccontextmanager
async def fleet_of_three(
    redis_client: redis.asyncio.Redis, redis_socket: Path, **names: str
) -> AsyncIterator[Edge]:
    """Instance b holds three of four blocks of the prompt; c hangs up."""
    engines = [FakeEngine(names.get(n, f"{n}:8000/0#1"), stream_all) for n in "ab"]
    async with edge(redis_client, redis_socket, *engines) as one:
        await store(redis_client, one.fleet, 1, chain(one.fleet, PROMPT)[:3])
        yield one


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_why_a_request_went_there_is_answered_by_looking(
    browser: Chromium, redis_client, redis_socket, *, size: dict[str, int], dark: bool
) -> None:
    """Who is there, what was decided last, and for one decision everyone's costs, in words too."""
    async with fleet_of_three(redis_client, redis_socket) as one:
        for number in range(6):
            await send(one, f"request-{number}")
            await until(one.process.ledger.settled, "Redis knows that it has ended")
        url = page_of(one.client)
        async with browser.tab(url, **size, dark=dark) as tab:
            await tab.see("document.querySelectorAll('.list tbody tr').length === 6")
            assert "a:8000/0" in await tab.text(".instances")
            assert (await tab.text(".list tbody tr")).split()[1] == "request-5"
            name = f"{'phone' if size is PHONE else 'desktop'}-{'dark' if dark else 'light'}"
            await tab.look(SHOTS / f"{name}.png", whole=True)
            await tab.click(".list tbody tr:nth-child(2) button")
            await tab.see("document.querySelector('.detail .chosen')")
            assert await tab.text("#detail-title") == "request-4"
            why = await tab.text(".why")
            assert why == (
                "b:8000/0 had the lowest score of 2 instances: (0 + 16) × (0 + 1) = 16. "
                "The next best, a:8000/0, scores 64: it holds 48 tokens less of the prompt."
            )
            rows = await tab.js(
                "[...document.querySelectorAll('.candidates .sum')].map(n => n.innerText)"
            )
            assert [row.split("\n")[-1] for row in rows] == [
                "(0 + 16) × (0 + 1) = 16",
                "(0 + 64) × (0 + 1) = 64",
            ]
            assert "chosen" in await tab.text(".candidates .chosen")
            assert "48 tokens" in await tab.text(".facts")
            await tab.look(SHOTS / f"{name}-decision.png", whole=True)
            told = await roles(tab)
            assert told.count("table") == 3
            assert {"row", "columnheader", "cell", "status", "article", "search"} <= set(told)
            await is_sound(tab, url.removesuffix("/dashboard"))


async def test_the_keyboard_reaches_everything(
    browser: Chromium, redis_client, redis_socket
) -> None:
    """Tab to a decision, Enter opens it and takes one there, Escape goes back to where one was."""
    active = "document.activeElement"
    async with fleet_of_three(redis_client, redis_socket) as one:
        await send(one, "the-one")
        async with browser.tab(page_of(one.client)) as tab:
            await tab.see("document.querySelector('.list button')")
            reached = []
            while "the-one" not in reached:
                assert len(reached) < 8, reached
                await tab.press("Tab")
                reached.append(await tab.js(f"{active}.innerText || {active}.id"))
                outline = await tab.js(f"getComputedStyle({active}).outlineStyle")
                assert outline != "none", reached
            await tab.press("Enter")
            await tab.see(f"{active}.id === 'detail-title'")
            await tab.press("Escape")
            await tab.see(f"{active}.innerText === 'the-one'")
            assert await tab.js("document.getElementById('detail').hidden")


async def test_what_comes_from_outside_stays_text(
    browser: Chromium, redis_client, redis_socket
) -> None:
    """Markup in request ids and instance names is shown as it is and does nothing."""
    async with fleet_of_three(redis_client, redis_socket, b=HOSTILE) as one:
        await send(one, HOSTILE)
        async with browser.tab(page_of(one.client)) as tab:
            await tab.see("document.querySelector('.list button')")
            await tab.click(".list button")
            await tab.see("document.querySelector('.detail .chosen')")
            assert await tab.text("#detail-title") == HOSTILE
            assert f"{HOSTILE} had the lowest score" in await tab.text(".why")
            assert await tab.js("document.querySelectorAll('img').length") == 0
            assert await tab.js("document.title") == "Timestable"
            blocked = await tab.js(
                "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'let' } "
                "catch (error) { return error.name } })()"
            )
            assert blocked == "TypeError"


async def test_a_running_request_is_followed_to_its_end(
    browser: Chromium, redis_client, redis_socket
) -> None:
    """What is open changes when the answer ends, and a retry shows both attempts."""
    broken, slow = FakeEngine("a:1/0", hang_up), FakeEngine("b:2/0", silent)
    async with (
        edge(redis_client, redis_socket, broken, slow) as one,
        asyncio.TaskGroup() as tasks,
    ):
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:3])
        tasks.create_task(send(one, "slow-one"))
        async with browser.tab(page_of(one.client)) as tab:
            await tab.see("document.querySelector('.list .word')?.innerText === 'running, 1 retry'")
            await tab.click(".list button")
            await tab.see("document.querySelectorAll('.attempt').length === 2")
            assert "running" in await tab.text(".facts")
            slow.let_go.set()
            await tab.see("document.querySelector('.facts').innerText.includes('completed')")
            await tab.see("document.querySelector('.list .word').innerText.startsWith('completed')")
            assert await tab.js(
                "document.querySelector('.figures').innerText.includes('In flight')"
            )


async def test_nothing_there_yet_is_said(browser: Chromium, redis_client, redis_socket) -> None:
    """An empty fleet and no decision tell what to do next."""
    async with edge(redis_client, redis_socket) as one:
        await redis_client.flushall()
        await one.process.index.refresh()
        url = page_of(one.client)
        async with browser.tab(url, **PHONE) as tab:
            await tab.see("document.querySelectorAll('.empty').length === 2")
            seen = await tab.text("main")
            assert "No instance" in seen
            assert "No decision yet" in seen
            await is_sound(tab, url.removesuffix("/dashboard"))


async def test_degraded_is_said(browser: Chromium, tmp_path: Path) -> None:
    """Without Redis the page says so, and why."""
    async with edge_without_redis(tmp_path) as client, browser.tab(page_of(client)) as tab:
        await tab.see("document.getElementById('state').dataset.state === 'degraded'")
        assert "Decisions are made without the index" in await tab.text("#notice")


async def test_a_router_that_is_gone_is_not_shown_as_alive(
    browser: Chromium, redis_client, redis_socket
) -> None:
    """The last figures stay, greyed, with their age and since when."""
    async with fleet_of_three(redis_client, redis_socket) as one:
        await send(one, "before")
        url = page_of(one.client)
        async with browser.tab(url, dark=True) as tab:
            await tab.see("document.querySelector('.list button')")
            await one.process.listeners.close()
            await tab.see("document.getElementById('state').dataset.state === 'lost'")
            assert "This router does not answer. What is shown is from " in await tab.text(
                "#notice"
            )
            assert "updated" in await tab.text("#state-age")
            assert "before" in await tab.text(".list")
            assert await faint_texts(tab) == []
            await tab.look(SHOTS / "disconnected.png")


async def test_a_request_is_found_by_its_id(browser: Chromium, redis_client, redis_socket) -> None:
    """By the form, by a link that was shared, and not found is said."""
    async with fleet_of_three(redis_client, redis_socket) as one:
        await send(one, "look-me-up")
        async with browser.tab(f"{page_of(one.client)}#request=look-me-up") as tab:
            await tab.see("document.getElementById('detail-title')?.innerText === 'look-me-up'")
            await tab.click("#find-id")
            await tab.type("nobody")
            await tab.press("Enter")
            await tab.see("document.getElementById('find-result').innerText.includes('nobody')")
            assert "keeps its last 512" in await tab.text("#find-result")


async def test_an_admin_key_is_asked_for_and_goes_out_as_a_header(
    browser: Chromium, redis_client, redis_socket
) -> None:
    """Nothing is shown without it; a wrong one is said; it is in no URL, and a tab forgets it."""
    key = "an-admin-key-of-some-length-0123456789"
    engine = FakeEngine("a:1/0", stream_all)
    async with edge(redis_client, redis_socket, engine, admin_key=key) as one:
        await send(one, "secret-one")
        async with browser.tab(page_of(one.client)) as tab:
            await tab.see("document.activeElement.id === 'key-value'")
            assert "a:1/0" not in await tab.text()
            await tab.type("wrong")
            await tab.press("Enter")
            await tab.see("document.getElementById('key-hint').dataset.kind === 'wrong'")
            await tab.click("#key-value")
            await tab.type(key)
            await tab.press("Enter")
            await tab.see("document.querySelector('.list')?.innerText.includes('secret-one')")
            assert any(head.get("Authorization") == f"Bearer {key}" for head in tab.headers)
            assert not [url for url in tab.requested if key in url]
            assert await tab.js("localStorage.length") == 0
            await tab.click("#forget")
            await tab.see("!document.getElementById('key').hidden")
            assert "secret-one" not in await tab.text()
            assert await tab.js("sessionStorage.length") == 0


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_a_large_fleet_leaves_room_for_its_decisions(
    browser: Chromium, redis_client, redis_socket, *, size: dict[str, int]
) -> None:
    """Many instances with long names scroll in place; who is ejected says why and how long."""
    async with fleet_of_three(redis_client, redis_socket) as one:
        await send(one, "the-one")
        url = page_of(one.client)
        async with browser.tab(url, **size) as tab:
            await tab.see("document.querySelector('.list button')")
            await tab.click("#pause")
            await tab.js(MANY)
            await tab.see("document.querySelectorAll('.instances tbody tr').length === 40")
            assert "ejected, 12 s left" in await tab.text(".instances")
            assert await tab.js(
                "document.getElementById('decisions').offsetTop < 1.3 * innerHeight"
            )
            await is_sound(tab, url.removesuffix("/dashboard"))
