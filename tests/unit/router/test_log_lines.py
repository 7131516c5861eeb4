"""When log lines are written."""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor

from waiting import until_equal

from router.log_lines import HELD_LINES_MAX, HeldLines


def written(out: io.StringIO) -> list[str]:
    """The lines."""
    return out.getvalue().splitlines()


async def test_lines_that_inform_are_written_together_and_soon() -> None:
    """None at once, all of them in a while, the next ones too."""
    out = io.StringIO()
    lines = HeldLines(out)
    for said in (["a", "b"], ["c"]):
        before = written(out)
        for line in said:
            lines.info(line)
        assert written(out) == before
        await until_equal(before + said, lambda: written(out))


async def test_a_warning_is_written_at_once_behind_what_is_held() -> None:
    """Whatever ends the process after it, it is there, and in its place."""
    out = io.StringIO()
    lines = HeldLines(out)
    lines.info("a")
    lines.warning("b")
    assert written(out) == ["a", "b"]


async def test_held_lines_are_bounded() -> None:
    """A busy process writes before the time is over."""
    out = io.StringIO()
    lines = HeldLines(out)
    for _ in range(HELD_LINES_MAX):
        lines.info("a")
    assert len(written(out)) == HELD_LINES_MAX


def test_nothing_is_held_where_nobody_comes_back() -> None:
    """Without an event loop, in a thread, and after the loop in which others were held."""
    out = io.StringIO()
    lines = HeldLines(out)

    async def hold(line: str) -> None:
        lines.info(line)

    asyncio.run(hold("a"))
    lines.info("b")
    assert written(out) == ["a", "b"]
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lines.info, "c").result()
    assert written(out) == ["a", "b", "c"]


async def test_a_new_loop_writes_what_an_ended_one_held() -> None:
    """Its timer has gone with it."""
    out = io.StringIO()
    lines = HeldLines(out)

    async def hold() -> None:
        lines.info("a")

    await asyncio.to_thread(asyncio.run, hold())
    lines.info("b")
    await until_equal(["a", "b"], lambda: written(out))


async def test_lines_of_many_threads_are_whole() -> None:
    """None is lost, doubled, or in two pieces."""
    out = io.StringIO()
    lines = HeldLines(out)
    said = [f"{number:04}" for number in range(1000)]
    async with asyncio.TaskGroup() as tasks:
        for line in said:
            tasks.create_task(asyncio.to_thread(lines.info, line))
            lines.info("loop" + line)
    lines.flush()
    assert sorted(written(out)) == sorted([*said, *(f"loop{line}" for line in said)])
