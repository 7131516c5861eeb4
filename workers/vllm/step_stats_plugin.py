"""vLLM plugin: what an engine's load is after each step, told to whoever listens.

vLLM finds `StepStatLogger` under its entry points `vllm.stat_logger_plugins` and makes one in each
API server. It is silent unless TIMESTABLE_VLLM_STEPS names an endpoint. A message is one frame of
msgpack: `[2, rank, running, waiting, KV usage ratio, sleep level, first tokens, ended requests,
computed tokens, process start]`: nil for the level of an engine that is awake; three counts since
the start, as vLLM's own metrics count them; and when that was, in seconds of the wall clock, to the
last digit as the metrics tell it, so that a listener knows whose steps these are. Only vLLM, what
it needs itself, and the standard library are imported.
"""

import logging
import os
from typing import Any, Final

import msgspec
import zmq
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.version import __version__

from workers.vllm.plugin_versions import check_version

ENDPOINT_VARIABLE: Final = "TIMESTABLE_VLLM_STEPS"
MESSAGE_VERSION: Final = 2

MESSAGES_MAX: Final = 1000
"""That may wait for a slow listener; newer ones are dropped then, and the next tells all again."""

log = logging.getLogger("vllm.timestable.steps")
"""Below vLLM's own logger, so that it is shown as vLLM's lines are."""


class StepStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM is not there for mypy
    """Sends one message for each step of each rank of this API server.

    Whatever goes wrong here ends the messages and nothing else: vLLM would end the engine.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._loads: dict[int, tuple[int, int, float]] = dict.fromkeys(engine_indexes, (0, 0, 0.0))
        self._totals = {index: [0, 0, 0] for index in engine_indexes}
        self._sleep_level: int | None = None
        self._started_s = REGISTRY.get_sample_value("process_start_time_seconds")
        self._socket = _open_socket(vllm_config)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002  # vLLM's signature
        engine_idx: int = 0,
    ) -> None:
        """A step has ended; either part may be missing."""
        if self._socket is None:
            return
        try:
            self._note(scheduler_stats, iteration_stats, engine_idx)
            if scheduler_stats is not None:
                self._tell(self._socket, engine_idx)
        except Exception as error:  # noqa: BLE001  # see the class
            self._give_up(error)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """All ranks went to sleep, or woke up."""
        self._sleep_level = level if sleep else None
        if self._socket is None:
            return
        try:
            for engine_idx in self._loads:
                self._tell(self._socket, engine_idx)
        except Exception as error:  # noqa: BLE001  # see the class
            self._give_up(error)

    def _note(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int) -> None:
        totals = self._totals.setdefault(engine_idx, [0, 0, 0])
        if iteration_stats is not None:
            totals[0] += len(iteration_stats.time_to_first_tokens_iter)
            totals[1] += len(iteration_stats.finished_requests)
            totals[2] += iteration_stats.num_generation_tokens
        if scheduler_stats is None:
            return
        looked_up = scheduler_stats.prefix_cache_stats
        totals[2] += looked_up.queries - looked_up.hits
        self._loads[engine_idx] = (
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            scheduler_stats.kv_cache_usage,
        )

    def _tell(self, socket: "zmq.Socket[bytes]", engine_idx: int) -> None:
        message = [
            MESSAGE_VERSION,
            engine_idx,
            *self._loads[engine_idx],
            self._sleep_level,
            *self._totals[engine_idx],
            self._started_s,
        ]
        socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)  # a PUB never blocks

    def _give_up(self, error: Exception) -> None:
        log.error("no more steps are told: %r", error)
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""


def _open_socket(vllm_config: Any) -> "zmq.Socket[bytes] | None":
    """None where nothing shall be, or can be told; what is missing then comes by the metrics."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    if not endpoint:
        return None
    if vllm_config.parallel_config._api_process_count > 1:  # noqa: SLF001  # told nowhere else
        log.error(
            "%s: with several API servers each knows a part only; nothing is sent",
            ENDPOINT_VARIABLE,
        )
        return None
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.SNDHWM, MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        log.error(  # noqa: TRY400  # no bug
            "%s=%s: %s; nothing is sent. Every engine of a host needs a port of its own",
            ENDPOINT_VARIABLE,
            endpoint,
            error,
        )
        socket.close()
        return None
    log.info("the load after each step is told at %s", endpoint)
    return socket


if os.environ.get(ENDPOINT_VARIABLE):
    check_version(__version__)  # vLLM says of a plugin that raises here that it is not loaded
