"""Builders of trace rows and request records with explicit defaults."""

from collections.abc import Callable

import pytest

from loadgen.records import RequestRecord
from loadgen.trace import TraceRow


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    """A successful request sent at 1 s: first token at 1.5 s, then one every 0.1 s."""

    def make(**changes: object) -> RequestRecord:
        values: dict[str, object] = {
            "request_id": "r",
            "row_index": 0,
            "scheduled_s": 1.0,
            "sent_s": 1.0,
            "sent_unix_s": 1_700_000_000.0,
            "first_token_s": 1.5,
            "token_times_s": (1.5, 1.6, 1.7),
            "finished_s": 1.8,
            "status": 200,
            "prompt_tokens": 1000,
            "output_tokens": 3,
            "cached_tokens": 400,
            "instance": "a",
        }
        return RequestRecord(**{**values, **changes})

    return make


@pytest.fixture
def make_row() -> Callable[..., TraceRow]:
    """A row of blocks of 4 tokens, all full unless prompt_tokens says otherwise."""

    def make(*block_ids: int, arrival_s: float = 0.0, **changes: object) -> TraceRow:
        values: dict[str, object] = {
            "arrival_s": arrival_s,
            "prompt_tokens": 4 * len(block_ids),
            "output_tokens": 2,
            "block_ids": block_ids,
            "block_size_tokens": 4,
        }
        return TraceRow(**{**values, **changes})

    return make
