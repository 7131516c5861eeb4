"""A trace in the form that is analysed: a few numbers a request, block runs in a temporary file."""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from loadgen.analysis.block_numbers import Numbers, PromptNumbers
from loadgen.analysis.prompts import full_block_ids
from loadgen.trace_row import TraceRow
from loadgen.workloads.options import ReadOptions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NO_SESSION = -1
MEMORY_BYTES_MAX = 64 << 20  # of block runs, before they go to a file

_NAMES_MAX = 50_000_000  # sessions of a trace: about 150 bytes each
_CATEGORY_CHARACTERS_MAX = 64  # of a name; a table has no room for more


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a trace in order of arrival, a column each.

    Attributes:
        arrival_s: seconds.
        prompt_tokens, output_tokens, block_size_tokens: of each.
        blocks: completely filled blocks of the prompt.
        session: number of the labelled conversation, or NO_SESSION.
        turn: as the trace labels it, from 0; else -1.
        category: index into `categories`.
        categories: as the trace names them, as far as it can be shown; "request" where it names
            none.
        sessions_count: labelled conversations.
        distinct_blocks: of all prompts.
        common_blocks: leading blocks that all unlabelled prompts share: a system prompt.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    block_size_tokens: Ints
    blocks: Ints
    session: Ints
    turn: Ints
    category: Ints
    categories: tuple[str, ...]
    sessions_count: int
    distinct_blocks: int
    common_blocks: int

    def __len__(self) -> int:
        return len(self.arrival_s)


class History:
    """Takes rows in any order, gives their block numbers in order of arrival.

    A context manager: the temporary file (where `TMPDIR` says, at most 8 bytes a block and mostly
    a fraction of it) is gone at its end.

    Args:
        options: block size of prompts that are not given as blocks.
        memory_bytes_max: of runs, before they go to a file.
    """

    def __init__(self, options: ReadOptions, *, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._options = options
        self._numbers = PromptNumbers()
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115  # closed by __exit__
            memory_bytes_max, prefix="timestable-analyze-"
        )
        self._offsets, self._sizes = array("q"), array("q")
        self._columns = {name: array("q") for name in _COLUMNS}
        self._arrivals = array("d")
        self._sessions: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._common: Numbers | None = None
        self._unlabelled_count = 0
        self._order: Ints | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # what could not be written is not wanted any more
            self._file.close()

    def take(self, rows: Iterable[TraceRow]) -> None:
        """Take in all rows.

        Raises:
            ValueError: too many blocks or sessions, no room for the temporary file, and what to do
                instead.
        """
        for row in rows:
            self._add(row)
        with _room_needed():
            self._file.flush()

    def _add(self, row: TraceRow) -> None:
        ids, prompt_tokens, size = full_block_ids(row, self._options)
        self._arrivals.append(row.arrival_s)
        session = NO_SESSION
        if row.session_id is not None:
            session = self._sessions.setdefault(row.session_id, len(self._sessions))
            if len(self._sessions) > _NAMES_MAX:
                raise ValueError(f"more than {_NAMES_MAX} sessions; analyse a part of the trace")
        numbers = self._numbers.of(ids, size, session)
        if session == NO_SESSION and len(numbers):
            self._share(numbers)
        category = _shown(row.category or "request")
        values = (
            prompt_tokens,
            row.output_tokens,
            size,
            len(numbers),
            session,
            -1 if row.turn is None else row.turn,
            self._categories.setdefault(category, len(self._categories)),
        )
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name].append(value)
        packed = _runs(numbers).tobytes()
        self._offsets.append(self._file.tell())
        self._sizes.append(len(packed))
        with _room_needed():
            self._file.write(packed)

    def _share(self, numbers: Numbers) -> None:
        self._unlabelled_count += 1
        if self._common is None:
            self._common = numbers
        length = min(len(self._common), len(numbers))
        differ = np.flatnonzero(self._common[:length] != numbers[:length])
        self._common = self._common[: differ[0] if len(differ) else length]

    def requests(self) -> Requests:
        """The columns of all rows taken, in order of arrival, as in the file among equals."""
        arrival_s = np.array(self._arrivals, dtype=np.float64)
        order: Ints = np.argsort(arrival_s, kind="stable")
        self._order = order
        columns = {
            name: np.array(values, np.int64)[order] for name, values in self._columns.items()
        }
        common = self._common if self._common is not None and self._unlabelled_count > 1 else ()
        return Requests(
            arrival_s=arrival_s[order],
            categories=tuple(self._categories),
            sessions_count=len(self._sessions),
            distinct_blocks=self._numbers.count,
            common_blocks=len(common),
            **columns,
        )

    def paths(self) -> Iterator[Numbers]:
        """Block numbers of each request's prompt, in the order of `requests`."""
        order = self._order
        assert order is not None, "set by requests"
        for place in order.tolist():
            self._file.seek(self._offsets[place])
            yield _numbers(np.frombuffer(self._file.read(self._sizes[place]), np.int32))


_COLUMNS = (
    "prompt_tokens",
    "output_tokens",
    "block_size_tokens",
    "blocks",
    "session",
    "turn",
    "category",
)


@contextmanager
def _room_needed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"no room for the temporary file in {tempfile.gettempdir()} ({error}); "
            "let TMPDIR name a folder that has it"
        ) from error


def _shown(category: str) -> str:
    """What a terminal and UTF-8 can take of a name: no control characters, no halves of pairs."""
    short = category[:_CATEGORY_CHARACTERS_MAX]
    return short if short.isprintable() else "".join(c if c.isprintable() else "?" for c in short)


def _runs(numbers: Numbers) -> Numbers:
    """Consecutive numbers as (first, count): a prompt's new blocks are numbered one by one."""
    if not len(numbers):
        return numbers
    starts = np.concatenate(([0], np.flatnonzero(numbers[1:] - numbers[:-1] != 1) + 1))
    counts = np.diff(starts, append=len(numbers)).astype(np.int32)
    return np.concatenate((numbers[starts], counts))


def _numbers(runs: Numbers) -> Numbers:
    """The reverse of `_runs`."""
    firsts, counts = np.split(runs, 2)
    before = np.cumsum(counts) - counts
    spread = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    numbers: Numbers = spread.astype(np.int32)
    return numbers
