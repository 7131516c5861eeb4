"""Tokenizers are loaded in threads of their own: a hub that does not answer holds up nobody."""

import asyncio
import threading
import time
from typing import Any, Final

import structlog

from router import telemetry
from router.tokens.loaded import LoadedTokenizer

log = structlog.get_logger()

RELOAD_AFTER_S: Final = 300.0
"""A tokenizer that could not be loaded is tried again after this long."""

READY_WAIT_S: Final = 30.0
"""A load that takes longer than this keeps no router from serving."""


class Load:
    """One attempt to load a tokenizer, in a thread that does not hold up the end of the process.

    Attributes:
        done: it has ended, one way or the other.
        tokenizer: what was loaded.
        problem: why nothing was.
    """

    def __init__(self, root: str, model: str, *, cache_bytes_max: int) -> None:
        self.done = asyncio.Event()
        self.tokenizer: LoadedTokenizer | None = None
        self.problem = ""
        self._root, self._model = root, model
        self._cache_bytes_max = cache_bytes_max
        self._started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="load-tokenizer", daemon=True).start()

    def expired(self) -> bool:
        """Whether this attempt has failed long enough ago for another one."""
        failed = self.done.is_set() and self.tokenizer is None
        return failed and time.monotonic() - self._started_s > RELOAD_AFTER_S

    def settled(self) -> bool:
        """Whether waiting for it is of no use (any more)."""
        return self.done.is_set() or time.monotonic() - self._started_s > READY_WAIT_S

    def view(self) -> dict[str, Any]:
        """For operators."""
        if not self.done.is_set():
            return {"state": "loading"}
        if self.tokenizer is None:
            return {"state": "unavailable", "problem": self.problem}
        encoder = self.tokenizer.encoder
        return {
            "state": "loaded",
            "whole_reason": encoder.whole_reason,
            "cache_bytes": encoder.cache_bytes,
        }

    def _run(self) -> None:
        try:
            self.tokenizer = LoadedTokenizer.load(self._root, cache_bytes_max=self._cache_bytes_max)
        except Exception as error:  # noqa: BLE001 - whatever a foreign loader raises, models go on
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        # The loop may be closed: a load that outlives the process's work has nobody to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self.done.set()
        telemetry.TOKENIZER_LOADED.labels(self._model).set(self.tokenizer is not None)
        if self.tokenizer is None:
            log.warning(
                "tokenizer_unavailable",
                model=self._model,
                root=self._root,
                problem=self.problem,
                effect="text prompts are routed by estimated hits",
                remedy="give its path or hub name with --tokenizers",
            )
            return
        reason = self.tokenizer.encoder.whole_reason
        log.info("tokenizer_loaded", model=self._model, root=self._root, incremental=reason is None)
        if reason is not None:
            log.warning(
                "tokenizer_not_incremental",
                model=self._model,
                root=self._root,
                problem=reason,
                effect="every turn of a chat is tokenized whole",
            )
