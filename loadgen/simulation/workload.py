"""Sessions to be played against a virtual fleet, drawn from a seed. Pure.

Chat sessions share system prompts of zipf popularity and have follow-ups: the next turn's prompt is
the last one, its answer and a new message, sent a think time after the answer's end (closed loop).
API calls are sessions of one turn over templates of their own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.simulated.request import output_index, pack_tokens

OUTPUT_IDS = range(1000, 5096)
"""Token ids that answers are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Shape of the workload; lengths are means of log-normal draws, sigma 0.6, in tokens.

    Attributes:
        session_rate: sessions that begin, per second, as a Poisson process.
        duration_s: no session and no turn begins after this.
        chat_share: of the sessions, 0..1; the others are API calls of one turn.
        turns_mean: turns of a chat session, geometric, at most `turns_max`.
        think_s: mean pause between an answer's end and the next turn, exponential.
    """

    session_rate: float
    duration_s: float
    chat_share: float = 0.5
    system_prompts_count: int = 12
    system_prompt_tokens: int = 1200
    templates_count: int = 20
    template_tokens: int = 1600
    message_tokens: int = 400
    answer_tokens: int = 220
    call_tokens: int = 900
    call_answer_tokens: int = 60
    turns_mean: float = 3.0
    turns_max: int = 10
    think_s: float = 2.0

    @property
    def requests_per_session(self) -> float:
        """Expected; the rate of requests is this times the rate of sessions."""
        stop = 1 / self.turns_mean
        turns = sum((1 - stop) ** i for i in range(self.turns_max))
        return self.chat_share * turns + 1 - self.chat_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session.

    Attributes:
        message: packed tokens that this turn adds to the history.
        output_tokens: length of the answer.
        think_s: pause after the turn before it.
        seed: selects the answer.
    """

    message: bytes
    output_tokens: int
    think_s: float
    seed: int

    def answer(self) -> bytes:
        """The packed tokens that the engine will answer with."""
        count = len(OUTPUT_IDS)
        return pack_tokens(
            [OUTPUT_IDS[output_index(self.seed, i, count)] for i in range(self.output_tokens)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation, or one API call."""

    session_id: str
    start_s: float
    shared: bytes  # packed system prompt or template
    turns: tuple[Turn, ...]


def draw_sessions(spec: WorkloadSpec, seed: int) -> list[Session]:
    """The sessions of one seed, by start; equal arguments give equal sessions."""
    rng = np.random.default_rng([seed, 1])
    system_lengths = _shared_lengths(
        spec.system_prompt_tokens, spec.system_prompts_count, seed=12345
    )
    template_lengths = _shared_lengths(spec.template_tokens, spec.templates_count, seed=54321)
    systems = [_tokens(rng, length) for length in system_lengths]
    templates = [_tokens(rng, length) for length in template_lengths]
    sessions: list[Session] = []
    start_s = 0.0
    while True:
        start_s += float(rng.exponential(1 / spec.session_rate))
        if start_s >= spec.duration_s:
            return sessions
        chat = bool(rng.random() < spec.chat_share)
        shared = systems if chat else templates
        weights = 1 / np.arange(1, len(shared) + 1)
        place = int(rng.choice(len(shared), p=weights / weights.sum()))
        name = f"{'chat' if chat else 'call'}-{len(sessions)}"
        sessions.append(
            Session(
                session_id=name,
                start_s=start_s,
                shared=shared[place],
                turns=_turns(rng, spec, chat=chat),
            )
        )


def _turns(rng: np.random.Generator, spec: WorkloadSpec, *, chat: bool) -> tuple[Turn, ...]:
    count = min(int(rng.geometric(1 / spec.turns_mean)), spec.turns_max) if chat else 1
    message_tokens = spec.message_tokens if chat else spec.call_tokens
    answer_tokens = spec.answer_tokens if chat else spec.call_answer_tokens
    return tuple(
        Turn(
            message=_tokens(rng, _length(rng, message_tokens)),
            output_tokens=_length(rng, answer_tokens),
            think_s=float(rng.exponential(spec.think_s)),
            seed=int(rng.integers(1 << 62)),
        )
        for _ in range(count)
    )


def _length(rng: np.random.Generator, mean_tokens: int) -> int:
    sigma = 0.6
    drawn = float(rng.lognormal(np.log(mean_tokens) - sigma**2 / 2, sigma))
    return int(np.clip(round(drawn), 8, 8 * mean_tokens))


def _shared_lengths(mean_tokens: int, count: int, *, seed: int) -> list[int]:
    """Lengths of what is shared: the same for every workload, so that seeds differ by traffic."""
    fixed = np.random.default_rng(seed)
    return [_length(fixed, mean_tokens) for _ in range(count)]


def _tokens(rng: np.random.Generator, count: int) -> bytes:
    drawn: npt.NDArray[np.uint32] = rng.integers(0, 100_000, count).astype(np.uint32)
    return drawn.tobytes()
