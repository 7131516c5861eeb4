"""No secret leaves a router: not by its logs, its errors, its operators' views."""

import asyncio
import base64
import json
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_edge import FakeEngine, broken_stream, completion, hang_up, plain
from router_edge import edge as in_front_of
from waiting import until

from router.door.visitor import digest_of

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SECRETS = {
    "redis password": "S3cret-of-redis",
    "key in the file": "S3cret-key-in-a-file",
    "key as an option": "S3cret-key-as-option",
    "admin key": "S3cret-of-admins",
    "engine key": "S3cret-for-engines",
    "unknown key": "S3cret-never-issued",
    "prompt": "S3cret-prompt-of-somebody",
}
MARK = "S3cret"


def bearer(key: str) -> dict[str, str]:
    """As a header."""
    return {"Authorization": f"Bearer {SECRETS[key]}"}


async def everything(client: aiohttp.ClientSession, port: int) -> str:
    """All that clients and operators are told, by requests that carry secrets everywhere."""
    told: list[str] = []

    async def ask(method: str, path: str, **options: Any) -> None:
        try:
            async with client.request(method, path, **options) as answer:
                told.extend((str(answer.headers), await answer.text()))
        except aiohttp.ClientError as error:
            told.append(repr(error))

    prompt = completion(prompt=SECRETS["prompt"], stream=False)
    for key in ("key in the file", "key as an option", "unknown key", "admin key"):
        await ask("POST", "/v1/completions", json=prompt, headers=bearer(key))
        await ask("POST", "/v1/messages", json={"model": "m"}, headers=bearer(key))
        await ask("POST", "/v1/completions", data=SECRETS["prompt"], headers=bearer(key))
        await ask("GET", "/v1/models", headers={"x-api-key": SECRETS[key]})
        password = base64.b64encode(f"x:{SECRETS[key]}".encode()).decode()
        await ask("GET", "/fleet", headers={"Authorization": f"Basic {password}"})
    for path in ("/fleet", "/metrics", "/decisions", "/dashboard", "/admin/state"):
        await ask("GET", path, headers=bearer("admin key"))
    for _ in range(3):  # retries, a stream that breaks
        await ask("POST", "/v1/completions", json=completion(), headers=bearer("key in the file"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET / HTTP/1.1\r\n{SECRETS['unknown key']}\r\n\r\n".encode())
    told.append((await reader.read()).decode())
    writer.close()
    return "\n".join(told)


@pytest.mark.timeout(90)
async def test_no_secret_is_told(redis_client, redis_socket, tmp_path) -> None:
    """With secrets in every place where there can be one, and every kind of failure once."""
    keys_file = tmp_path / "keys.yaml"
    good = f"- {{name: one, sha256: {digest_of(SECRETS['key in the file']).hex()}}}\n"
    await asyncio.to_thread(keys_file.write_text, good)
    engines = [FakeEngine("a", plain), FakeEngine("b", hang_up), FakeEngine("c", broken_stream)]
    options = {
        "TIMESTABLE_ROUTER_API_KEYS": SECRETS["key as an option"],
        "TIMESTABLE_ROUTER_ADMIN_KEY": SECRETS["admin key"],
        "TIMESTABLE_ROUTER_ENGINE_API_KEY": SECRETS["engine key"],
        "PATH": "/usr/bin:/bin",
    }
    acl = ("ACL", "SETUSER", "secretive", "on", f">{SECRETS['redis password']}", "~*", "+@all")
    await redis_client.execute_command(*acl)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--port", "0", "--log_level", "debug"),
        *("--tokenize_deadline_s", "0.1"),
        *("--redis_url", f"unix://secretive:{SECRETS['redis password']}@{redis_socket}"),
        *("--api_keys_file", str(keys_file)),
        cwd=ROOT,
        env=options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert child.stdout is not None
    lines: list[str] = []
    collecting = asyncio.ensure_future(_collect(child.stdout, lines))
    try:
        await until(lambda: _port(lines), "it listens", deadline_s=30.0)
        url = f"http://127.0.0.1:{_port(lines)}"
        async with (
            in_front_of(redis_client, redis_socket, *engines),
            aiohttp.ClientSession(url) as client,
        ):
            told = await everything(client, _port(lines))
        await asyncio.to_thread(keys_file.write_text, f"- {SECRETS['key in the file']}\n")
        child.send_signal(signal.SIGHUP)
        await until(lambda: "api_keys_not_reloaded" in "".join(lines), "it has looked")
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15.0):
            await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await collecting
        await redis_client.execute_command("ACL", "DELUSER", "secretive")
    said = "".join(lines)
    assert '"router_started"' in said
    assert '"request_routed"' in said
    assert MARK not in said
    assert MARK not in told
    sent = {headers["Authorization"] for one in engines for headers in one.headers}
    assert sent == {f"Bearer {SECRETS['engine key']}"}


async def _collect(out: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await out.readline():
        lines.append(line.decode())


def _port(lines: list[str]) -> int:
    listening = [json.loads(line) for line in lines if '"listening"' in line]
    return listening[0]["port"] if listening else 0
