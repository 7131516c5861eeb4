"""Errors a person who runs the load generator can act on; the message says what to change."""

from collections.abc import Callable
from functools import partial
from pathlib import Path


class LoadgenError(Exception):
    """Base of every error that ends a run before or instead of measuring."""


class TraceError(LoadgenError):
    """A trace file, or one row of it, cannot be used.

    Args:
        path: the file.
        reason: what is wrong, in words that name the field.
        line_number: line counted from 1; None when the whole file is meant.
    """

    def __init__(self, path: Path, reason: str, *, line_number: int | None = None) -> None:
        where = f"{path}" if line_number is None else f"{path}, line {line_number}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.reason = reason
        self.line_number = line_number

    def __reduce__(self) -> tuple[Callable[[], "TraceError"], tuple[()]]:
        """A pool of processes pickles what its workers raise; what it cannot read breaks it."""
        return partial(type(self), self.path, self.reason, line_number=self.line_number), ()


class SliceError(LoadgenError):
    """The wanted slice of a trace is empty or cannot be made from these rows."""


class RecordsError(LoadgenError):
    """A file of request records cannot be read."""


class OutputError(LoadgenError):
    """A file to be written cannot be.

    Args:
        option: the option that names the file.
        reason: what is wrong with it.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class EndpointError(LoadgenError):
    """The URL under test is malformed or tells nothing about its model."""


class WorkloadError(LoadgenError):
    """A generated workload, or a rate asked of one, is impossible; the setting is named."""
