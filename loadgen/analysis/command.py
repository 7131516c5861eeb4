"""`python -m loadgen analyze`: from trace files to figures, tables and the page."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from loadgen.analysis.figures import CAPACITIES, TraceFigures, figures
from loadgen.analysis.history import History
from loadgen.analysis.report.console import console_categories, console_overview
from loadgen.analysis.report.page import page
from loadgen.analysis.reuse import find_reuses
from loadgen.errors import TraceError
from loadgen.outputs import check_output, write_whole
from loadgen.progress import LINE_INTERVAL_S
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import Span, read_rows, single_traces

SUMMARY_VERSION = 1
TITLE = "What these workloads reuse"
_SUFFIXES = (".gz", ".zst", ".jsonl")


def analyze(
    traces: Sequence[str], options: ReadOptions, span: Span, folder: Path, console: Console
) -> None:
    """Analyse each trace, print the tables, write `summary.json` and `report.html`.

    Args:
        traces: files; those of a format's second kind go with every trace.
        options: what the traces leave open.
        span: the part wanted of each.
        folder: of these files.
        console: for progress and tables.

    Raises:
        LoadgenError: a file cannot be read or written, or leaves a choice open.
    """
    for name in ("summary.json", "report.html"):
        check_output("output", folder / name)
    groups = single_traces([Path(trace) for trace in traces])
    found: dict[str, TraceFigures] = {}
    for files in groups:
        name = _name(files[0])
        while name in found:
            name += "'"
        found[name] = _analyzed(name, files, options, span, console)
    summary = {
        "version": SUMMARY_VERSION,
        "options": {**asdict(options), **asdict(span)},
        "traces": {name: asdict(one) for name, one in found.items()},
    }
    write_whole("output", folder / "summary.json", json.dumps(summary, allow_nan=False))
    notes = {"traces": ", ".join(files[0].name for files in groups), **_choices(options, span)}
    write_whole("output", folder / "report.html", page(TITLE, found, notes))
    # Last: whoever reads only the first lines of it ends the command.
    console.print(console_overview(found))
    for name, one in found.items():
        console.print(console_categories(name, one))
    for label, file in (("report", "report.html"), ("figures", "summary.json")):
        console.print(f"{label}: {folder / file}", markup=False, soft_wrap=True)


def _analyzed(
    name: str, files: Sequence[Path], options: ReadOptions, span: Span, console: Console
) -> TraceFigures:
    trace = files[0]
    with _stages(name, console) as stage, History(options) as history:
        read = stage("reading", trace.stat().st_size)
        try:
            history.take(read_rows(files, options, span, on_read=read))
        except ValueError as error:
            raise TraceError(trace, str(error)) from error
        requests = history.requests()
        if not len(requests):
            raise TraceError(trace, "no request arrives within --from_s and --duration_s")
        reuses = find_reuses(requests, history.paths(), _counter(stage("reuse", len(requests))))
        return figures(requests, reuses, _counter(stage("cache sizes", CAPACITIES)))


def _name(path: Path) -> str:
    name = path.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _choices(options: ReadOptions, span: Span) -> dict[str, str]:
    """The options that are not as they are by default."""
    defaults = {**asdict(ReadOptions()), **asdict(Span())}
    chosen = {**asdict(options), **asdict(span)}
    differ = [f"{name} {value}" for name, value in chosen.items() if value != defaults[name]]
    return {"chosen": ", ".join(differ)} if differ else {}


def _counter(advance: Callable[[int], None]) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        advance(done)

    return count


@contextmanager
def _stages(name: str, console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A bar for each stage; where there is no terminal, a line every few seconds."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    told_s = time.monotonic()
    with bar:

        def stage(what: str, total: int) -> Callable[[int], None]:
            task = bar.add_task(f"{name}: {what}", total=total)

            def advance(done: int) -> None:
                nonlocal told_s
                bar.update(task, completed=done)
                if bar.disable and time.monotonic() - told_s >= LINE_INTERVAL_S:
                    told_s = time.monotonic()
                    text = f"{name}: {what}, {done / total:.0%}"
                    console.print(text, highlight=False, markup=False)

            return advance

        yield stage
