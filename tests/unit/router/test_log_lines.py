"""When log lines are written."""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import REGISTRY
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


class Recorder(io.StringIO):
    """Remembers what came in one write; takes nothing while it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.full = False

    def write(self, text: str) -> int:
        """As told."""
        if self.full:
            raise OSError(28, "No space left on device")
        self.writes.append(text)
        return super().write(text)


def test_what_cannot_be_written_is_lost_and_counted() -> None:
    """A full disk, or a reader that has gone, ends no router; with room again lines go on."""
    out = Recorder()
    lines = HeldLines(out)
    before = lost()
    out.full = True
    lines.warning("a")
    lines.info("b")
    out.full = False
    lines.warning("c")
    assert (written(out), lost() - before) == (["c"], 2)
    out.close()
    lines.warning("d")
    assert lost() - before == 3


def lost() -> float:
    """The counter."""
    return REGISTRY.get_sample_value("timestable_router_log_lines_lost_total") or 0.0


async def test_a_shared_pipe_gets_whole_lines() -> None:
    """No write is longer than is taken in one piece, but of a line that is longer itself."""
    out = Recorder()
    lines = HeldLines(out, write_bytes_max=8)
    for line in ("abc", "def", "ghi", "a line that is longer", "\u00e9\u00e9\u00e9", "\u00e9", "j"):
        lines.info(line)
    lines.flush()
    assert out.writes == [
        "abc\ndef\n",
        "ghi\n",
        "a line that is longer\n",
        "\u00e9\u00e9\u00e9\n",
        "\u00e9\nj\n",
    ]
