"""Command line: `python -m loadgen replay | generate | convert | analyze | report | ...`."""

import resource
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import uvloop
from rich.console import Console
from rich.markup import escape

from loadgen import arrivals
from loadgen.analysis.config import AnalyzeConfig
from loadgen.client import Target, first_model
from loadgen.config import (
    CapacityConfig,
    ConsistencyConfig,
    ConvertConfig,
    GenerateConfig,
    ReplayConfig,
    ReportConfig,
    SimulateConfig,
    parse,
)
from loadgen.errors import LoadgenError, OutputError, TraceError
from loadgen.metrics import Slo
from loadgen.outputs import check_output
from loadgen.progress import show_progress
from loadgen.records import Run, read_run, write_run
from loadgen.replay import ReplayResult, replay
from loadgen.report import console_table, figures_json
from loadgen.slicing import SliceSpec, summarise, summary_lines, take_slice
from loadgen.trace import WRITTEN_SUFFIXES, TraceRow, check_kind, read_trace, write_trace
from loadgen.workloads.generators import generated_rows
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.ordering import by_arrival
from loadgen.workloads.reading import Span, read_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXIT_NOTHING_SUCCEEDED = 1
EXIT_VERDICT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_FILES_PER_REQUEST = 2  # a connection, and slack for those being closed


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    console = Console()
    try:
        config = parse(arguments)
        match config:
            case ReplayConfig():
                status = _replay(config, console)
            case GenerateConfig() | ConvertConfig() | AnalyzeConfig():
                status = _of_traces(config, console)
            case ReportConfig():
                status = _report(config, console)
            case ConsistencyConfig():
                status = _consistency(config, console)
            case SimulateConfig():
                status = _simulate(config, console)
            case CapacityConfig():
                status = _capacity(config, console)
            case unknown:
                assert_never(unknown)
    except (LoadgenError, OSError) as exc:
        Console(stderr=True).print(f"error: {exc}", style="red", markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _replay(config: ReplayConfig, console: Console) -> int:
    trace = read_trace(config.trace, skip_bad_rows=config.skip_bad_rows)
    if trace.skipped_rows_count:
        console.print(f"left out {trace.skipped_rows_count} broken rows", style="yellow")
    spec = SliceSpec(**_fields_of(SliceSpec, config))
    rows = take_slice(trace.rows, spec)
    schedule = _schedule(config, rows)
    check_output("out", config.out)
    _check_report_files(config)
    notes = {
        "trace": f"{trace.path.name} ({trace.format_name} format)",
        **summary_lines(summarise(rows)),
        "rate": f"{arrivals.rate(schedule):.3g} requests/s offered, {config.arrivals} arrivals",
        "URL": config.url,
        "seed": str(config.seed),
    }
    for label, text in notes.items():
        console.print(f"{label:>14}  {text}", markup=False, soft_wrap=True)
    _allow_open_files(config.in_flight_max * _FILES_PER_REQUEST)
    result = uvloop.run(_run(config, rows, schedule, console))
    run = Run(name=config.name, records=result.records, notes=notes)
    write_run(config.out, run)
    _show(console, config.name, [run], config, notes)
    console.print(f"records: {escape(config.out)}")
    if result.interrupted:
        console.print(f"interrupted: {len(result.records)} of {len(rows)} requests are recorded")
        return EXIT_INTERRUPTED
    succeeded = any(record.error is None for record in result.records)
    return 0 if succeeded else EXIT_NOTHING_SUCCEEDED


async def _run(
    config: ReplayConfig, rows: tuple[TraceRow, ...], schedule: arrivals.Schedule, console: Console
) -> ReplayResult:
    target = Target(
        url=config.url,
        model=config.model or await first_model(config.url, api_key=config.api_key),
        vocabulary_tokens=config.vocabulary_tokens,
        token_seed=config.token_seed,
        api_key=config.api_key,
        headers=config.headers,
        connect_timeout_s=config.connect_timeout_s,
        request_timeout_s=config.request_timeout_s,
    )
    with show_progress(config.name, console) as on_progress:
        return await replay(
            rows,
            schedule,
            target,
            in_flight_max=config.in_flight_max,
            wait_for_previous_turn=config.wait_for_previous_turn,
            pace=config.pace,
            on_progress=on_progress,
            interrupt_signals=(signal.SIGINT, signal.SIGTERM),
        )


def _schedule(config: ReplayConfig, rows: tuple[TraceRow, ...]) -> arrivals.Schedule:
    rate = config.request_rate
    if config.arrivals == "trace":
        return arrivals.replay([row.arrival_s for row in rows], request_rate=rate)
    if rate is None:
        raise LoadgenError(f"{config.arrivals} arrivals need --request_rate")
    if config.arrivals == "poisson":
        return arrivals.poisson(len(rows), request_rate=rate, seed=config.seed)
    return arrivals.constant(len(rows), request_rate=rate)


def _of_traces(config: GenerateConfig | ConvertConfig | AnalyzeConfig, console: Console) -> int:
    match config:
        case GenerateConfig():
            return _generate(config, console)
        case ConvertConfig():
            return _convert(config, console)
        case AnalyzeConfig():
            return _analyze(config, console)


def _generate(config: GenerateConfig, console: Console) -> int:
    path = _trace_output("out", config.out)
    rows = generated_rows(config)
    write_trace(path, rows)
    for label, text in summary_lines(summarise(rows)).items():
        console.print(f"{label:>14}  {text}", markup=False, soft_wrap=True)
    console.print(f"trace: {escape(str(path))}")
    return 0


def _convert(config: ConvertConfig, console: Console) -> int:
    path = _trace_output("output", config.output)
    options = ReadOptions(**_fields_of(ReadOptions, config))
    rows = read_rows(
        [Path(trace) for trace in config.traces], options, Span(**_fields_of(Span, config))
    )
    count = write_trace(path, by_arrival(rows))
    console.print(f"{count:,} requests")
    console.print(f"trace: {escape(str(path))}")
    return 0


def _analyze(config: AnalyzeConfig, console: Console) -> int:
    from loadgen.analysis import command  # noqa: PLC0415  # seldom needed

    options = ReadOptions(**_fields_of(ReadOptions, config))
    span = Span(**_fields_of(Span, config))
    try:
        command.analyze(config.traces, options, span, Path(config.output), console)
    except KeyboardInterrupt:
        console.print("interrupted: results are written at the end, an earlier report stays")
        raise
    return 0


def _trace_output(option: str, name: str) -> Path:
    """The path of a trace to be written, checked."""
    path = Path(name)
    try:
        check_kind(path, WRITTEN_SUFFIXES)
    except TraceError as exc:
        raise OutputError(option, str(exc)) from exc
    check_output(option, path)
    return path


def _fields_of(kind: "type[DataclassInstance]", config: object) -> dict[str, Any]:
    """The options of a command that are also fields of `kind`."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in vars(config).items() if name in names}


def _report(config: ReportConfig, console: Console) -> int:
    runs = [read_run(path) for path in config.records.split(",")]
    shared = dict.fromkeys(label for run in runs for label in run.notes)
    notes = {
        label: runs[0].notes[label]
        for label in shared
        if len({run.notes.get(label) for run in runs}) == 1
    }
    _check_report_files(config)
    _show(console, config.title, runs, config, notes)
    return 0


def _consistency(config: ConsistencyConfig, console: Console) -> int:
    from loadgen.simulation import study  # noqa: PLC0415  # loads the router, when asked for

    check_output("output", config.output)
    capacity = config.capacity
    if config.find_capacity:
        capacity = study.find_capacity(low=60, high=320, steps=5, requests_count=2000)
        console.print(f"capacity: {capacity:.0f} requests/s")
    plan = study.make_plan(
        quick=config.quick,
        requests_count=config.requests_count,
        seeds_count=config.seeds_count,
        capacity=capacity,
    )
    return 0 if study.run(plan, Path(config.output), console) else EXIT_VERDICT_FAILED


def _simulate(config: SimulateConfig, console: Console) -> int:
    from loadgen.simulation.lab import command  # noqa: PLC0415  # loads the router, when asked for

    selection = command.Selection(**_fields_of(command.Selection, config))
    try:
        command.simulate(
            selection,
            Path(config.output),
            console,
            processes=config.processes,
            fresh=config.fresh,
        )
    except KeyboardInterrupt:
        console.print("interrupted: finished runs are kept, the same command goes on with the rest")
        raise
    return 0


def _capacity(config: CapacityConfig, console: Console) -> int:
    from loadgen.simulation.lab import command  # noqa: PLC0415  # loads the router, when asked for
    from loadgen.simulation.lab.capacity import Bounds  # noqa: PLC0415

    selection = command.Selection(**_fields_of(command.Selection, config))
    bounds = Bounds(ttft_p99_s=config.ttft_p99_s, tpot_mean_s=config.tpot_mean_s)
    if config.slo_ratio is not None:
        bounds = Bounds(ttft_p99_s=None, tpot_mean_s=None, slo_ratio=config.slo_ratio)
    found = command.capacity(selection, bounds, console, processes=config.processes)
    return 0 if all(one.rate for one in found.values()) else EXIT_VERDICT_FAILED


def _check_report_files(config: ReplayConfig | ReportConfig) -> None:
    if config.html is not None:
        check_output("html", config.html)
    if config.json is not None:
        check_output("json", config.json)


def _show(
    console: Console,
    title: str,
    runs: list[Run],
    config: ReplayConfig | ReportConfig,
    notes: dict[str, str],
) -> None:
    """The table, and the files asked for."""
    slo = Slo(
        ttft_s=config.slo_ttft_s,
        ttft_per_1000_prompt_tokens_s=config.slo_ttft_per_1000_prompt_tokens_s,
        tpot_s=config.slo_tpot_s,
    )
    console.print(console_table(title, runs, slo))
    reasons = [record.error for run in runs for record in run.records if record.error is not None]
    for reason in list(dict.fromkeys(reasons))[:3]:
        console.print(f"error, {reasons.count(reason)} times: {reason}", markup=False)
    if config.json is not None:
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(figures_json(runs, slo), encoding="utf-8")
        console.print(f"figures: {escape(config.json)}")
    if config.html is not None:
        from loadgen.html import write_report  # noqa: PLC0415  # loads plotly, when asked for

        write_report(config.html, title, runs, notes, slo=slo)
        console.print(f"report: {escape(config.html)}")


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64  # standard streams, libraries, the event loop
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
