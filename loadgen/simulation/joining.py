"""The first minute of a cold instance in a warm fleet. Pure.

It is no magnet when its queue stays at or below the longest of the others (plus a slack for small
numbers), and its TTFT within a factor of theirs once it has settled: before, it computes what all
others hold, so its TTFT tells how cold it is, and its queue whether it is flooded. No leper when it
has half a fair share of the requests soon enough.
"""

from dataclasses import dataclass

import numpy as np

from loadgen.simulation.records import FleetRun, RequestRecord

WINDOW_S = 5.0
QUEUE_SLACK_REQUESTS = 4
TTFT_FACTOR_MAX = 2.0
SETTLED_AFTER_S = 10.0
HALF_SHARE_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Five seconds after the joining; "new" is the new instance, "others" one of the others.

    Attributes:
        request_share: of the requests; a fair one is 1 / instances.
        prefill_share: of the tokens really computed for prompts.
        new_queue_max: largest batch (running and waiting) in a report of it.
        others_queue_mean: mean batch over the others' reports.
        others_queue_max: largest batch in any report of the others.
    """

    from_s: float
    request_share: float
    prefill_share: float
    new_hit_ratio: float
    others_hit_ratio: float
    new_ttft_mean_s: float
    others_ttft_mean_s: float
    new_queue_max: int
    others_queue_mean: float
    others_queue_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The windows of one run and what they say."""

    windows: list[Window]
    is_magnet: bool
    is_leper: bool
    half_share_after_s: float


def judge(run: FleetRun, *, join_s: float, end_s: float) -> Joining:
    """Look at the last instance, from its joining on."""
    count = int((end_s - join_s) / WINDOW_S + 1e-9)
    windows = [_window(run, join_s, i * WINDOW_S) for i in range(count)]
    half = 0.5 / run.instances_count
    reached = [w.from_s + WINDOW_S for w in windows if w.request_share >= half]
    after_s = min(reached, default=float("inf"))
    return Joining(
        windows=windows,
        is_magnet=any(w.new_queue_max > w.others_queue_max + QUEUE_SLACK_REQUESTS for w in windows)
        or any(
            w.new_ttft_mean_s > TTFT_FACTOR_MAX * w.others_ttft_mean_s
            for w in windows
            if w.from_s >= SETTLED_AFTER_S
        ),
        is_leper=after_s > HALF_SHARE_WITHIN_S,
        half_share_after_s=after_s,
    )


def _window(run: FleetRun, join_s: float, from_s: float) -> Window:
    start_s = join_s + from_s
    newest = run.instances_count - 1
    seen = [r for r in run.records if start_s <= r.arrived_s < start_s + WINDOW_S]
    new, others = [r for r in seen if r.slot == newest], [r for r in seen if r.slot != newest]
    samples = [s for s in run.samples if start_s <= s.at_s < start_s + WINDOW_S]
    queues = [s.batch_size for s in samples if s.slot != newest]
    return Window(
        from_s=from_s,
        request_share=len(new) / max(1, len(seen)),
        prefill_share=_computed(new) / max(1, _computed(seen)),
        new_hit_ratio=_hit_ratio(new),
        others_hit_ratio=_hit_ratio(others),
        new_ttft_mean_s=_ttft(new),
        others_ttft_mean_s=_ttft(others),
        new_queue_max=max((s.batch_size for s in samples if s.slot == newest), default=0),
        others_queue_mean=float(np.mean(queues)) if queues else 0.0,
        others_queue_max=max(queues, default=0),
    )


def _computed(records: list[RequestRecord]) -> int:
    return sum(r.prompt_tokens - r.hit_tokens for r in records)


def _hit_ratio(records: list[RequestRecord]) -> float:
    return sum(r.hit_tokens for r in records) / max(1, sum(r.prompt_tokens for r in records))


def _ttft(records: list[RequestRecord]) -> float:
    return float(np.mean([r.ttft_s for r in records])) if records else 0.0
