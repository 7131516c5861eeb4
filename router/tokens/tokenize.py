"""Prompt -> token ids, exactly as the engine will see them, off the event loop.

A chat is rendered by the model's template and gets no special tokens beyond it; a plain text gets
them, as in vLLM. The work is done in a bounded pool of threads through `encode_batch_fast`, which
releases the GIL.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from indexer.contract.block_hash import TOKEN_BYTES, pack_tokens
from router import telemetry
from router.errors import DegradedCause, TokensUnknown
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, ChatPrompt, TextPrompt, TokenPrompt
from router.tokens.chat_template import conversation, iterates_parts

log = structlog.get_logger()

RELOAD_AFTER_S: Final = 300.0
"""A tokenizer that could not be loaded is tried again after this long."""

WARM_UP_S: Final = 0.25
"""How often models are looked through for tokenizers to load ahead of their first request."""

READY_WAIT_S: Final = 30.0
"""A load that takes longer than this (a hub that does not answer) keeps no router from serving."""

TEXT_BYTES_PER_TOKEN_MAX: Final = 64
"""A text of more bytes for each token that the model takes is too long without counting."""

BYTES_PER_TOKEN_ESTIMATE: Final = 4
"""English text and JSON; used only where token ids are not to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Token ids of a request.

    Attributes:
        packed: token ids of the first prompt as little-endian u32; empty when they are unknown.
        prompt_tokens: of all prompts together, at least 1; an estimate when `packed` is empty.
        longest_tokens: of the longest prompt; 0 when unknown.
    """

    packed: bytes
    prompt_tokens: int
    longest_tokens: int


def estimate(call: ApiCall, limit_tokens: int | None) -> EncodedPrompt:
    """Stand-in for a prompt whose token ids are not to be had: a length and nothing to look up.

    No more than the model takes: the engine refuses what is longer and computes none of it.
    """
    tokens = max(1, len(call.body) // BYTES_PER_TOKEN_ESTIMATE)
    if limit_tokens is not None:
        tokens = min(tokens, limit_tokens)
    return EncodedPrompt(packed=b"", prompt_tokens=tokens, longest_tokens=0)


class Tokenizer(Protocol):
    """Turns requests into token ids."""

    async def encode(self, served: ServedModel, call: ApiCall) -> EncodedPrompt:
        """Encode within a deadline.

        Raises:
            TokensUnknown: tokenizer missing, too slow, or its template refused the messages.
        """
        ...


class ModelTokenizers:
    """Each model's own tokenizer and chat template, loaded on first use or ahead of it.

    Args:
        paths: operator's mapping from model name to a path or hub name; else the engine's own.
        threads: size of the pool.
        deadline_s: for one request, waiting for a thread included.
    """

    def __init__(self, *, paths: Mapping[str, str], threads: int, deadline_s: float) -> None:
        self._paths = paths
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._loads: dict[str, _Load] = {}

    async def encode(self, served: ServedModel, call: ApiCall) -> EncodedPrompt:
        """See `Tokenizer`; token ids come back as they are, without a thread."""
        prompt = call.prompt
        if isinstance(prompt, TokenPrompt):
            return _encoded(prompt.packed, call, served)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                loaded = await self._loaded(served)
                loop = asyncio.get_running_loop()
                packed = await loop.run_in_executor(self._pool, loaded.encode, prompt)
        except TimeoutError:
            raise TokensUnknown(
                DegradedCause.TOKENIZER_SLOW, f"tokenizing took longer than {self._deadline_s:g} s"
            ) from None
        telemetry.TOKENIZER_SECONDS.observe(time.monotonic() - started_s)
        return _encoded(packed, call, served)

    async def run(self, models: Callable[[], Mapping[str, ServedModel]]) -> None:
        """Load tokenizers of known models ahead of their first request, until cancelled."""
        while True:
            for served in list(models().values()):
                if self._worth_loading_early(served):
                    self._load(served)
            await asyncio.sleep(WARM_UP_S)

    def loading(self, models: Mapping[str, ServedModel]) -> list[str]:
        """Models whose tokenizer will soon be there: their first requests would get no hits."""
        return sorted(
            name
            for name, served in models.items()
            if self._worth_loading_early(served) and not self._load(served).settled()
        )

    def close(self) -> None:
        """Let the threads end; requests that still wait for one are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _root(self, served: ServedModel) -> str:
        by_name = self._paths.get(served.name) or self._paths.get(served.fleet.model_scope)
        return by_name or served.model_root

    def _worth_loading_early(self, served: ServedModel) -> bool:
        """Whether the root is the operator's choice, a directory or `owner/name`.

        Anything else waits for a text prompt: nothing is gained by asking a hub about the made-up
        name of an engine that only takes token ids.
        """
        root = self._root(served)
        return root != served.model_root or "/" in root or Path(root).is_dir()

    def _load(self, served: ServedModel) -> "_Load":
        root = self._root(served)
        load = self._loads.get(root)
        if load is None or load.expired():
            load = self._loads[root] = _Load(root, served.fleet.model_scope)
        return load

    async def _loaded(self, served: ServedModel) -> "LoadedTokenizer":
        load = self._load(served)
        await load.done.wait()
        if load.tokenizer is None:
            raise TokensUnknown(DegradedCause.TOKENIZER_UNAVAILABLE, load.problem)
        return load.tokenizer


def _encoded(packed: tuple[bytes, ...], call: ApiCall, served: ServedModel) -> EncodedPrompt:
    keep = call.truncate_prompt_tokens
    if keep == -1:
        keep = served.max_model_len_tokens
    if keep:
        packed = tuple(one[-keep * TOKEN_BYTES :] for one in packed)
    counts = [len(one) // TOKEN_BYTES for one in packed]
    return EncodedPrompt(
        packed=packed[0], prompt_tokens=max(1, sum(counts)), longest_tokens=max(counts)
    )


# -- loading --------------------------------------------------------------------------------------


class _Load:
    """One attempt to load a tokenizer, in a thread that does not hold up the end of the process."""

    def __init__(self, root: str, model: str) -> None:
        self.done = asyncio.Event()
        self.tokenizer: LoadedTokenizer | None = None
        self.problem = ""
        self._root, self._model = root, model
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

    def _run(self) -> None:
        try:
            self.tokenizer = LoadedTokenizer.load(self._root)
        except Exception as error:  # noqa: BLE001 - whatever a foreign loader raises, models go on
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        # The loop may be closed: a load that outlives the process's work has nobody to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self.done.set()
        telemetry.TOKENIZER_LOADED.labels(self._model).set(self.tokenizer is not None)
        if self.tokenizer is not None:
            log.info("tokenizer_loaded", model=self._model, root=self._root)
        else:
            log.warning(
                "tokenizer_unavailable",
                model=self._model,
                root=self._root,
                problem=self.problem,
                effect="text prompts are routed without prefix hits",
                remedy="give its path or hub name with --tokenizers",
            )


# -- one tokenizer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer with its chat template. Its methods block and are safe in several threads.

    Attributes:
        tokenizer: transformers' fast tokenizer, for the template.
        backend: the `tokenizers.Tokenizer` inside, for the ids.
        iterates_parts: the template walks over content parts, so they stay a list.
    """

    tokenizer: Any
    backend: Any
    iterates_parts: bool

    @classmethod
    def load(cls, root: str) -> "LoadedTokenizer":
        """Load from a directory or hub name; raises whatever transformers raises."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - a second that others need not pay

        tokenizer = AutoTokenizer.from_pretrained(root)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{root} has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        template = tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        return cls(
            tokenizer=tokenizer,
            backend=backend,
            iterates_parts=any(iterates_parts(text) for text in texts),
        )

    def encode(self, prompt: ChatPrompt | TextPrompt) -> tuple[bytes, ...]:
        """Token ids of each prompt, packed.

        Raises:
            TokensUnknown: the template refused the messages.
        """
        texts = [self.render(prompt)] if isinstance(prompt, ChatPrompt) else list(prompt.texts)
        encodings = self.backend.encode_batch_fast(
            texts, add_special_tokens=prompt.add_special_tokens
        )
        return tuple(pack_tokens(encoding.ids) for encoding in encodings)

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the model's template makes of a conversation."""
        if prompt.chat_template is not None:
            # Rendering a stranger's template could occupy a thread for ever.
            raise TokensUnknown(
                DegradedCause.TEMPLATE_FAILED, "the request brings its own template"
            )
        arguments = prompt.template_kwargs | {
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
        }
        for reserved in ("conversation", "tools", "documents", "chat_template", "tokenize"):
            arguments.pop(reserved, None)
        try:
            text = self.tokenizer.apply_chat_template(
                conversation(prompt.messages, iterates_parts=self.iterates_parts),
                tools=prompt.tools,
                documents=prompt.documents,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # templates raise what they like
            raise TokensUnknown(DegradedCause.TEMPLATE_FAILED, str(error)) from error
        return str(text)
