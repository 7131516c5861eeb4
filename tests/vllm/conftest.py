"""One real fleet for all tests here; the table of what they found at the end."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.vllm.asking import Asker
from tests.vllm.cases import Report
from tests.vllm.fleet import RealFleet

REPORT = pytest.StashKey[Report]()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet() -> AsyncIterator[RealFleet]:
    """The fleet, started once: two engines take minutes."""
    async with RealFleet.running() as running:
        yield running


@pytest.fixture(scope="session")
def report(fleet: RealFleet, pytestconfig: pytest.Config) -> Iterator[Report]:
    """Where cases are noted; written at the end, whatever failed."""
    report = Report(journals=fleet.journals)
    pytestconfig.stash[REPORT] = report
    yield report
    report.write()


@pytest.fixture
def asker(fleet: RealFleet) -> Asker:
    """A client of both routers."""
    return Asker(session=fleet.session, router_urls=fleet.router_urls)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table."""
    report = config.stash.get(REPORT, None)
    if report is not None:
        terminalreporter.section("real vLLM")
        for line in report.lines():
            terminalreporter.write_line(line)
