"""`python -m deploy.chaos` or `make chaos`: every fault, under load, and what it cost."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from deploy import command_line
from deploy.chaos import books, chaos_fleet, phase, soak, summary
from deploy.chaos.config import ChaosConfig, names
from deploy.chaos.errors import ChaosError
from deploy.chaos.faults import by_name
from deploy.chaos.faults.base import FaultCase
from deploy.chaos.summary import FaultResult
from deploy.local import signals
from deploy.local.errors import FleetError

LOG_COLUMNS: Final = 120
"""Width of the table where no terminal has one."""


def plan(config: ChaosConfig) -> Iterator[FaultCase]:
    """The list once, or rounds of faults at the same time until the soak's time is over."""
    cases = by_name(names(config))
    if not config.soak_s:
        yield from (case() for case in cases)
        return
    until_s = time.monotonic() + config.soak_s
    for one in soak.rounds(cases, np.random.default_rng(config.seed)):
        if time.monotonic() > until_s:
            return
        yield one


def table(results: Sequence[FaultResult]) -> Table:
    """Results for a person."""
    shown = Table("fault", "requests", "failed", "explained", "left", "recovery s", "TTFT p99 s")
    shown.add_column("counters")
    shown.add_column("verdict")
    for one in results:
        recovery = "never" if one.recovery_s is None else f"{one.recovery_s:.2f}"
        figures = (one.requests, one.failed, one.failed_explained, one.clients_left)
        if one.skipped is not None:
            shown.add_row(one.name, *([""] * 7), f"skipped: {one.skipped}")
            continue
        shown.add_row(
            one.name,
            *map(str, figures),
            recovery,
            f"{one.ttft_p99_s:.2f}",
            "zero" if one.counters_zero else "NOT ZERO",
            "passed" if one.passed else "FAILED",
        )
    return shown


async def chaos(config: ChaosConfig, console: Console) -> int:
    """Do it all, writing the summary after each fault; the exit code.

    Raises:
        FleetError: a part failed that nobody had meant to.
    """
    results: list[FaultResult] = []
    path = config.out_dir / "summary.json"
    async with (
        chaos_fleet.running(config, console.print) as fleet,
        books.opened(fleet) as open_books,
    ):
        await fleet.wait_whole(config.recovery_deadline_s)
        for number, case in enumerate(plan(config)):
            result = await phase.run(fleet, open_books, case, seed=config.seed * 1000 + number)
            results.append(result)
            verdict = "skipped" if result.skipped else "passed" if result.passed else "FAILED"
            console.print(
                f"{case.name:>32} {verdict}: {result.requests} requests, {result.failed} failed "
                f"({result.failed_explained} explained), recovery {result.recovery_s} s",
                highlight=False,
                soft_wrap=True,
            )
            for line in (*result.trouble, *result.unexplained):
                console.print(f"{'':>36}{line}", highlight=False, markup=False, soft_wrap=True)
            body = summary.as_json(results, seed=config.seed, rate=config.rate)
            path.write_text(json.dumps(body, indent=2) + "\n")
            if result.skipped is None and result.recovery_s is None:
                break  # what follows would measure this fault
    console.print(table(results))
    console.print(f"figures  {path}", highlight=False)
    return summary.exit_code(results)


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 1 when a fault cost too much, 2 for a bad option, 128 + signal when interrupted."""
    given = sys.argv[1:] if args is None else args
    config = command_line.parse(
        ChaosConfig,
        prog="python -m deploy.chaos",
        env_prefix="TIMESTABLE_CHAOS",
        args=["--quick=true" if one == "--quick" else one for one in given],
    )
    # Broken connections are what this is about: proxies and links need not tell each.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    try:
        return signals.run(lambda: chaos(config, console))
    except (ChaosError, FleetError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
