"""Shows a replay's progress: a bar on a terminal, a line every few seconds anywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.replay import Progress as ReplayProgress

LINE_INTERVAL_S = 5.0


@contextmanager
def show_progress(name: str, console: Console) -> Iterator[Callable[[ReplayProgress], None]]:
    """A callback for `replay(on_progress=...)`; the display ends with the context.

    Args:
        name: shown in front, e.g. the policy.
        console: where; decides by itself whether it is a terminal.
    """
    if not console.is_terminal:
        yield _line_printer(name, console)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    )
    with bar:
        task = bar.add_task(name, total=None, state="")

        def update(progress: ReplayProgress) -> None:
            bar.update(
                task,
                total=progress.total_count,
                completed=progress.finished_count,
                state=_state(progress),
            )

        yield update


def _line_printer(name: str, console: Console) -> Callable[[ReplayProgress], None]:
    printed_s = 0.0

    def update(progress: ReplayProgress) -> None:
        nonlocal printed_s
        finished = progress.finished_count == progress.total_count
        if finished or progress.elapsed_s - printed_s >= LINE_INTERVAL_S:
            printed_s = progress.elapsed_s
            console.print(
                f"{name}: {progress.finished_count}/{progress.total_count} requests, "
                f"{progress.elapsed_s:.0f} s, {_state(progress)}",
                highlight=False,
            )

    return update


def _state(progress: ReplayProgress) -> str:
    return f"{progress.in_flight_count} in flight, {progress.errors_count} errors"
