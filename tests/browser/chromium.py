"""A real Chromium, driven over its own protocol: one process, a fresh tab for every test."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from waiting import until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

OPTIONS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0", "--force-color-profile=srgb"),
)

START_S = 30
CALL_S = 20


def program() -> str:
    """Path of a Chromium; TIMESTABLE_CHROMIUM names one that is not on the path."""
    named = os.environ.get("TIMESTABLE_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert found, (
        "no Chromium: install one (Debian, Ubuntu: apt install chromium), or name it in "
        "TIMESTABLE_CHROMIUM=/path/to/chromium"
    )
    return found


@dataclass(slots=True)
class Tab:
    """One page, with what went wrong in it."""

    socket: aiohttp.ClientWebSocketResponse
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    number: int = 0

    async def listen(self) -> None:
        """Take answers and events until the page is gone."""
        async for message in self.socket:
            said = json.loads(message.data)
            if "id" in said:
                call = self.calls.pop(said["id"])
                if not call.done():
                    call.set_result(said)
                continue
            what, how = said["method"], said["params"]
            if what == "Runtime.exceptionThrown":
                self.problems.append(
                    how["exceptionDetails"].get("exception", {}).get("description")
                )
            elif what == "Log.entryAdded" and how["entry"]["source"] != "network":
                self.problems.append(how["entry"]["text"])
            elif what == "Network.requestWillBeSent":
                self.requested.append(how["request"]["url"])
                self.headers.append(how["request"]["headers"])

    async def call(self, method: str, **params: Any) -> Any:
        """One call of the protocol."""
        self.number += 1
        number = self.number
        answer = self.calls[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_S):
            said = await answer
        assert "error" not in said, (method, said["error"])
        return said["result"]

    async def js(self, expression: str) -> Any:
        """The value of an expression, awaited when it is a promise."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, (expression, said["exceptionDetails"])
        return said["result"].get("value")

    async def see(self, expression: str, deadline_s: float = 10.0) -> None:
        """Wait until an expression is true; a failure shows the page's text."""
        tried = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        try:
            await until(lambda: self.js(tried), expression, deadline_s)
        except AssertionError as error:
            text = await self.js("document.body.innerText")
            raise AssertionError(f"{error}; the page says:\n{text}\n{self.problems}") from None

    async def text(self, selector: str = "body") -> str:
        """What is seen of an element."""
        return str(
            await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    async def press(self, key: str) -> None:
        """A key of the keyboard."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        how = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **how, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    async def type(self, text: str) -> None:
        """Text into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        where = json.dumps(selector)
        await self.see(f"document.querySelector({where}).checkVisibility()")
        box = await self.js(
            f"(() => {{ const one = document.querySelector({where}); one.scrollIntoView("
            "{block: 'center'}); const b = one.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    async def look(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as a PNG; whole: below the fold too."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        _save(path, base64.b64decode(shot["data"]))


def _save(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@dataclass(slots=True, kw_only=True)
class Chromium:
    """A running browser."""

    session: aiohttp.ClientSession
    url: str

    @asynccontextmanager
    async def tab(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: int = 1
    ) -> AsyncIterator[Tab]:
        """A new page of this size and colour scheme, in a profile of its own."""
        async with self.session.put(f"{self.url}/json/new?about:blank") as answer:
            target = await answer.json()
        async with (
            self.session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket,
            asyncio.TaskGroup() as tasks,
        ):
            one = Tab(socket)
            listening = tasks.create_task(one.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await one.call(f"{domain}.enable")
            await one.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=scale,
                mobile=width < 600,
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            still = {"name": "prefers-reduced-motion", "value": "reduce"}
            await one.call("Emulation.setEmulatedMedia", features=[scheme, still])
            await one.call("Page.navigate", url=url)
            try:
                yield one
            finally:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await one.call("Page.close")
                listening.cancel()


@asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """A browser with an empty profile, until the context ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        unconfined = ["--no-sandbox"] if os.geteuid() == 0 else []
        process = await asyncio.create_subprocess_exec(
            *(program(), *OPTIONS, *unconfined, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        port = Path(profile) / "DevToolsActivePort"
        try:
            await until(
                lambda: port.exists() and port.read_text().count("\n"), "Chromium listens", START_S
            )
            url = f"http://127.0.0.1:{port.read_text().split()[0]}"
            async with aiohttp.ClientSession() as session:
                yield Chromium(session=session, url=url)
        finally:
            process.terminate()
            await process.wait()
