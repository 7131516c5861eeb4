"""One connection for everybody: order, cancellation, breaks."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import redis.asyncio
import uvloop
from fleets import until
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from deploy.local import embedded_redis
from indexer.contract.link import connected, wire

pytestmark = pytest.mark.integration


async def test_answers_belong_to_their_commands(redis_client, redis_socket: Path) -> None:
    """Many callers at once each get their own answer."""
    async with connected(f"unix://{redis_socket}") as link:
        answers = await asyncio.gather(*(link.execute_command("ECHO", str(n)) for n in range(500)))
    assert answers == [str(n).encode() for n in range(500)]


async def test_a_caller_that_leaves_disturbs_nobody(redis_client, redis_socket: Path) -> None:
    """Its answer is dropped; the others' still match, over the same connection."""
    async with connected(f"unix://{redis_socket}") as link:
        first = await link.execute_command("CLIENT", "ID")
        tasks = [asyncio.ensure_future(link.execute_command("ECHO", str(n))) for n in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert answers[1::2] == [str(n).encode() for n in range(1, 100, 2)]
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
        assert await link.execute_command("CLIENT", "ID") == first


async def test_a_refused_command_raises_and_the_rest_is_done(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """An error of one command of a batch is raised after all were answered."""
    async with connected(f"unix://{redis_socket}") as link:
        with pytest.raises(ResponseError, match="unknown command"):
            await link.execute([("SET", "a", 1), ("NONSENSE",), ("SET", "b", 2.5)])
        assert await link.execute([("GET", "a"), ("GET", "b")]) == [b"1", b"2.5"]


async def test_a_broken_connection_fails_at_once_and_heals(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Waiting callers learn of the break, later ones of the gap, and then it works again."""
    async with connected(f"unix://{redis_socket}") as link:
        own = await link.execute_command("CLIENT", "ID")
        waiting = asyncio.ensure_future(link.execute_command("BLPOP", "never", 0))
        await until(redis_client.client_list, "the server sees us")
        await redis_client.execute_command("CLIENT", "KILL", "ID", own)
        with pytest.raises(RedisConnectionError, match="broke"):
            await waiting
        with pytest.raises(RedisConnectionError, match="no connection"):
            await link.execute_command("PING")

        async def healed() -> bool:
            with contextlib.suppress(RedisConnectionError):
                return await link.execute_command("PING") == b"PONG"
            return False

        await until(healed, "a new connection")


async def test_a_server_that_falls_silent_is_given_up(
    redis_client: redis.asyncio.Redis, redis_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command may wait for long while others are answered; with nothing heard, all are told."""
    monkeypatch.setattr(wire, "STALL_S", 0.5)
    async with connected(f"unix://{redis_socket}") as link:
        own = await link.execute_command("CLIENT", "ID")
        slow = ("BLPOP", "never", 0.3)
        assert await link.execute([slow, slow, ("CLIENT", "ID")]) == [None, None, own]
        waiting = [link.execute_command("BLPOP", "never", 0), link.execute_command("PING")]
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, RedisConnectionError)
            assert "no answer for" in str(error)


async def test_without_a_server_the_first_caller_is_told(tmp_path: Path) -> None:
    """The first connection is worth waiting for; when it fails, callers fail."""
    async with connected(f"unix://{tmp_path}/nobody.sock") as link:
        with pytest.raises(RedisConnectionError, match="no connection"):
            await link.execute_command("PING")


def test_resets_under_load_are_weather_on_uvloop(redis_socket: Path) -> None:
    """Between a reset and whoever connects anew, uvloop's transports raise errors of their own."""

    async def played() -> set[str]:
        seen: set[str] = set()
        url = f"unix://{redis_socket}"
        async with connected(url) as link, embedded_redis.client(url) as by:
            stop = asyncio.Event()

            async def client() -> None:
                while not stop.is_set():
                    try:
                        seen.add(str(await link.execute_command("PING")))
                    except Exception as error:  # noqa: BLE001 - which ones is the question
                        seen.add(type(error).__name__)
                    await asyncio.sleep(0)

            async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(client())
                for _ in range(5):
                    await asyncio.sleep(0.2)
                    await by.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                stop.set()
        return seen

    assert uvloop.run(played()) == {"b'PONG'", "ConnectionError"}
