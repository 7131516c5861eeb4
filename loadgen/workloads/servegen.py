"""Pure: requests drawn from ServeGen's measured clients (github.com/alibaba/ServeGen, Apache-2.0).

Two files. Rates, one row per client and window of 600 s, in order of time: `chunk` (client),
`timestamp` (s), `rate` (requests/s), `cv`, `pat_name` (Gamma or Weibull, empty when idle),
`pat_arg1` (shape), `pat_arg2` (scale). Lengths, one row per client and window of 21,600 s: `chunk`,
`timestamp`, `input_tokens`, `output_tokens` (texts of the form `{value: probability}`).

- A client's requests of a window: as many as its rate says (the fraction by a draw), with gaps of
  the stated family and shape, scaled so that they fill the window: the rate gives the scale.
- Prompt and answer lengths are drawn independently, from the client's latest window of lengths that
  is not empty, or its earliest. A client without any (15 of 162 of m-large, 40 % of its requests)
  borrows those of another client.
- Neither sessions nor blocks: how prompts are made has to be chosen (`prompts`); a client is a
  group, and the request's category.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import PromptBlocks
from loadgen.workloads.fields import Fields, integer, number, text
from loadgen.workloads.options import ReadOptions

WINDOW_S = 600.0
_WINDOW_REQUESTS_MAX = 5_000_000
_SEED_STREAM = 17

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def is_rates(fields: Fields) -> bool:
    """Whether a row belongs to a file of rates."""
    return "pat_name" in fields


def is_lengths(fields: Fields) -> bool:
    """Whether a row belongs to a file of lengths."""
    return "chunk" in fields and "input_tokens" in fields


@dataclass(frozen=True, slots=True)
class _Lengths:
    """A distribution of lengths: values and their cumulative probabilities."""

    values: Integers
    cumulative: Floats

    def draw(self, generator: np.random.Generator, count: int) -> Integers:
        places = np.searchsorted(self.cumulative, generator.random(count), side="right")
        drawn: Integers = self.values[np.minimum(places, len(self.values) - 1)]
        return drawn


@dataclass(slots=True)
class ServegenLengths:
    """Lengths of every client, by window."""

    _windows: dict[int, list[tuple[float, _Lengths, _Lengths]]] = field(default_factory=dict)

    def add(self, fields: Fields) -> None:
        """Take in one row; rows without lengths are passed over. Raises ValueError."""
        prompt = _distribution(fields, "input_tokens")
        answer = _distribution(fields, "output_tokens")
        if prompt is not None and answer is not None:
            windows = self._windows.setdefault(integer(fields, "chunk"), [])
            windows.append((number(fields, "timestamp"), prompt, answer))
            windows.sort(key=lambda window: window[0])

    def at(self, client: int, time_s: float) -> tuple[_Lengths, _Lengths]:
        """Prompt and answer lengths of a client. Raises ValueError when no client has any."""
        if not self._windows:
            raise ValueError("the lengths file has no lengths at all")
        if client not in self._windows:
            lenders = sorted(self._windows)
            client = lenders[client % len(lenders)]
        windows = self._windows[client]
        place = bisect_right(windows, time_s, key=lambda window: window[0])
        _, prompt, answer = windows[max(0, place - 1)]
        return prompt, answer


@dataclass(slots=True)
class ServegenReader:
    """Requests of one window after another.

    Args:
        options: see the module.
        lengths: of all clients.
        from_s: windows that end before this are passed over.
    """

    options: ReadOptions
    lengths: ServegenLengths
    from_s: float = 0.0
    _blocks: PromptBlocks = field(init=False)
    _window: list[Fields] = field(default_factory=list)
    _window_s: float = -1.0
    _requests_count: int = 0

    def __post_init__(self) -> None:
        self._blocks = PromptBlocks(self.options)

    def rows(self, fields: Fields) -> Iterable[TraceRow]:
        """The window before, when this row begins another. Raises ValueError with a reason."""
        time_s = number(fields, "timestamp")
        done: Iterable[TraceRow] = ()
        if time_s != self._window_s:
            if time_s < self._window_s:
                raise ValueError("timestamp is before that of the row above; sort the file by it")
            done = self.finish()
            self._window_s = time_s
        self._window.append(fields)
        return done

    def finish(self) -> Iterator[TraceRow]:
        """The requests of the window held, in order of arrival. Raises ValueError."""
        window, self._window = self._window, []
        return self._requests(window, self._window_s)

    def _requests(self, window: list[Fields], start_s: float) -> Iterator[TraceRow]:
        if not window or start_s + WINDOW_S <= self.from_s:
            return
        parts: list[tuple[Floats, Integers, Integers, Integers]] = []
        for fields in window:
            client = integer(fields, "chunk")
            # A stream of its own per client and window: a slice has the requests of the whole.
            stream = [self.options.seed, _SEED_STREAM, client, int(start_s)]
            generator = np.random.default_rng(stream)
            arrivals_s = start_s + _arrivals_s(fields, generator)
            count = len(arrivals_s)
            if count:
                prompt, answer = self.lengths.at(client, start_s)
                drawn = (prompt.draw(generator, count), answer.draw(generator, count))
                parts.append((arrivals_s, *drawn, np.full(count, client)))
        if not parts:
            return
        arrivals, prompts, answers, clients = (np.concatenate(c) for c in zip(*parts, strict=True))
        for place in np.argsort(arrivals, kind="stable"):
            self._requests_count += 1
            prompt_tokens, client = max(1, int(prompts[place])), int(clients[place])
            yield TraceRow(
                arrival_s=round(float(arrivals[place]), 6),
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, int(answers[place])),
                block_ids=self._blocks.blocks(prompt_tokens, group=client),
                block_size_tokens=self.options.block_size_tokens,
                session_id=f"request-{self._requests_count}",
                turn=0,
                category=f"client-{client}",
            )


def _arrivals_s(fields: Fields, generator: np.random.Generator) -> Floats:
    """Seconds from the window's start, rising."""
    expected = number(fields, "rate") * WINDOW_S
    if not 0 <= expected <= _WINDOW_REQUESTS_MAX:
        raise ValueError(f"rate must be 0 to {_WINDOW_REQUESTS_MAX / WINDOW_S:.0f} requests/s")
    count = int(expected + generator.random())
    if count == 0:
        return np.empty(0)
    family, shape = text(fields, "pat_name"), number(fields, "pat_arg1")
    if family not in ("Gamma", "Weibull") or not 0 < shape < float("inf"):
        raise ValueError("pat_name must be Gamma or Weibull with pat_arg1, the shape, above 0")
    draw = generator.gamma if family == "Gamma" else generator.weibull
    ends = np.cumsum(draw(shape, size=count + 1))
    if ends[-1] <= 0:  # so small a shape that every gap is below the smallest float
        return np.sort(generator.random(count)) * WINDOW_S
    arrivals_s: Floats = ends[:-1] / ends[-1] * WINDOW_S
    return arrivals_s


def _distribution(fields: Fields, name: str) -> _Lengths | None:
    """The text `{value: probability, ...}`; None when it is empty."""
    inner = text(fields, name).strip().removeprefix("{").removesuffix("}").strip()
    if not inner:
        return None
    try:
        pairs = [part.split(":") for part in inner.split(",")]
        values = np.array([int(float(value)) for value, _ in pairs], dtype=np.int64)
        weights = np.array([float(weight) for _, weight in pairs])
    except (ValueError, OverflowError) as exc:
        raise ValueError(f"{name} must look like {{value: probability, ...}}: {exc}") from exc
    total = float(weights.sum())
    if weights.min() < 0 or not 0 < total < float("inf"):
        raise ValueError(f"{name} must have probabilities that are not negative, not all 0")
    return _Lengths(values, np.cumsum(weights) / total)
