"""A browser for each test of the page."""

from collections.abc import AsyncIterator

import pytest
from browser.chromium import Chromium, chromium


@pytest.fixture
async def browser() -> AsyncIterator[Chromium]:
    """A real Chromium with an empty profile."""
    async with chromium() as one:
        yield one
