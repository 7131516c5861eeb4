"""Engine metrics in vLLM's names and labels.

Written out by hand, because a sidecar scrapes them up to 20 times a second.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator

from workers.simulated.engine import Engine

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Cumulative buckets of one duration."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self._sum_s += value_s

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Exposition lines of this histogram."""
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*self._bounds_s, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}.0'
        yield f"{name}_count{{{labels}}} {total}.0"
        yield f"{name}_sum{{{labels}}} {self._sum_s}"


class EngineMetrics:
    """What the server observes, and the text of `/metrics`.

    Durations are real seconds, as a client sees them. Beside vLLM's names there are
    `simulated_engine_lag_seconds` (how far the engine is behind its own timetable now),
    `simulated_engine_lag_seconds_max`, and `simulated_engine_busy_seconds_total` (virtual).
    """

    def __init__(self, model_name: str) -> None:
        self._labels = f'model_name="{_escape(model_name)}",engine="0"'
        self._started_s = time.time()
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.itl = Histogram(ITL_BUCKETS_S)
        self.e2e = Histogram(E2E_BUCKETS_S)
        self.queue = Histogram(E2E_BUCKETS_S)
        self.prefill = Histogram(E2E_BUCKETS_S)
        self.decode = Histogram(E2E_BUCKETS_S)
        self.finished_counts = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejected_count = 0
        self.taking_count: Callable[[], int] = lambda: 0
        """Requests whose KV$ is on its way from another engine."""
        self.lag_s = 0.0
        self.lag_max_s = 0.0

    def observe_lag(self, lag_s: float) -> None:
        """How late the current step is; 0 when it is on time."""
        self.lag_s = lag_s
        self.lag_max_s = max(self.lag_max_s, lag_s)

    def render(self, engine: Engine) -> str:
        """Prometheus text format."""
        lines = [*self._gauges(engine), *self._counters(engine), *self._histograms(), ""]
        return "\n".join(lines)

    def _gauges(self, engine: Engine) -> Iterator[str]:
        labels = self._labels
        waiting, deferred = engine.waiting_count, self.taking_count()
        yield "# TYPE vllm:num_requests_running gauge"
        yield f"vllm:num_requests_running{{{labels}}} {engine.running_count}.0"
        yield "# TYPE vllm:num_requests_waiting gauge"
        yield f"vllm:num_requests_waiting{{{labels}}} {waiting + deferred}.0"
        yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
        for reason, count in (("capacity", waiting), ("deferred", deferred)):
            labelled = f'{{{labels},reason="{reason}"}}'
            yield f"vllm:num_requests_waiting_by_reason{labelled} {count}.0"
        yield "# TYPE vllm:engine_sleep_state gauge"
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            yield f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {value}.0'
        yield "# TYPE vllm:kv_cache_usage_perc gauge"
        yield f"vllm:kv_cache_usage_perc{{{labels}}} {engine.kv_usage_ratio}"
        config = engine.config
        yield "# TYPE vllm:cache_config_info gauge"
        yield (
            f'vllm:cache_config_info{{block_size="{config.block_size_tokens}",'
            f'enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{config.capacity_blocks}"}} 1.0'
        )
        yield "# TYPE simulated_engine_lag_seconds gauge"
        yield f"simulated_engine_lag_seconds {self.lag_s}"
        yield "# TYPE simulated_engine_lag_seconds_max gauge"
        yield f"simulated_engine_lag_seconds_max {self.lag_max_s}"
        yield "# TYPE process_start_time_seconds gauge"
        yield f"process_start_time_seconds {self._started_s}"

    def _counters(self, engine: Engine) -> Iterator[str]:
        totals = engine.totals
        for name, value in (
            ("prefix_cache_queries", totals.prefix_queries_tokens),
            ("prefix_cache_hits", totals.prefix_hits_tokens),
            (
                "external_prefix_cache_queries",
                totals.prefix_queries_tokens - totals.prefix_hits_tokens,
            ),
            ("external_prefix_cache_hits", totals.tier_hits_tokens),
            ("num_preemptions", totals.preemption_count),
            ("prompt_tokens", totals.prompt_tokens),
            ("prompt_tokens_cached", totals.prefix_hits_tokens + totals.tier_hits_tokens),
            ("generation_tokens", totals.generated_tokens),
        ):
            yield f"# TYPE vllm:{name}_total counter"
            yield f"vllm:{name}_total{{{self._labels}}} {value}.0"
        yield "# TYPE vllm:request_success_total counter"
        for reason, count in self.finished_counts.items():
            labelled = f'{{{self._labels},finished_reason="{reason}"}}'
            yield f"vllm:request_success_total{labelled} {count}.0"
        yield "# TYPE vllm:admission_rejections_total counter"
        labelled = f'{{{self._labels},reason="max_num_queued_reqs"}}'
        yield f"vllm:admission_rejections_total{labelled} {self.rejected_count}.0"
        yield "# TYPE simulated_engine_busy_seconds_total counter"
        yield f"simulated_engine_busy_seconds_total {totals.busy_s}"
        yield "# TYPE process_cpu_seconds_total counter"
        yield f"process_cpu_seconds_total {time.process_time()}"

    def _histograms(self) -> Iterator[str]:
        for name, histogram in (
            ("time_to_first_token_seconds", self.ttft),
            ("inter_token_latency_seconds", self.itl),
            ("e2e_request_latency_seconds", self.e2e),
            ("request_queue_time_seconds", self.queue),
            ("request_prefill_time_seconds", self.prefill),
            ("request_decode_time_seconds", self.decode),
        ):
            yield from histogram.lines(f"vllm:{name}", self._labels)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
