"""Prompt -> token ids, exactly as the engine will see them.

A chat is rendered by the model's template and gets no special tokens beyond it; a plain text gets
them, as in vLLM. What takes no time is done at once (`at_once.py`), such as a turn of a chat that
goes on; all else in a bounded pool of threads, with a deadline. Tokenizing releases the GIL.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import aiohttp

from indexer.contract.block_hash import TOKEN_BYTES
from router import telemetry
from router.errors import DegradedCause, TokensUnknown
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, ChatPrompt, OpaquePrompt, TextPrompt, TokenPrompt
from router.tokens import at_once
from router.tokens.agreement import Agreement
from router.tokens.hash_chains import HashChains
from router.tokens.loaded import LoadedTokenizer
from router.tokens.loading import Load
from router.tokens.work_pool import PoolFull, WorkPool

T = TypeVar("T")

WARM_UP_S: Final = 0.25
"""How often models are looked through for tokenizers to load ahead of their first request."""

TEXT_BYTES_PER_TOKEN_MAX: Final = 64
"""A text of more bytes for each token that the model takes is too long without counting."""

BYTES_PER_TOKEN_ESTIMATE: Final = 4
"""English text and JSON; used only where token ids are not to be had."""

HASH_OFF_LOOP_BYTES: Final = 64 * 1024
"""Packed ids that take about half a millisecond to hash; more are hashed in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Token ids of a request.

    Attributes:
        packed: token ids of the first prompt as little-endian u32; empty when they are unknown.
        prompt_tokens: of all prompts together, at least 1; an estimate when `packed` is empty.
        longest_tokens: of the longest prompt; 0 when unknown.
        last_packed: of the last prompt that fills a canonical block, of the first if none does.
        text: of the first prompt, see `tokens.approximate`; empty where token ids are known.
    """

    packed: bytes
    prompt_tokens: int
    longest_tokens: int
    last_packed: bytes
    text: bytes = b""


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
        waiting_max: requests that may wait for a thread.
        cache_bytes_max: of each tokenizer, for texts it has seen; 0 tokenizes all of them whole.
        chains: remembers block hashes; they are made in the pool as well.
        open_session: to engines, which are asked for their token ids; takes what aiohttp's does.
    """

    def __init__(
        self,
        *,
        paths: Mapping[str, str],
        threads: int,
        deadline_s: float,
        waiting_max: int = 512,
        cache_bytes_max: int = 64 * 1024 * 1024,
        chains: HashChains | None = None,
        open_session: Callable[..., aiohttp.ClientSession] = aiohttp.ClientSession,
    ) -> None:
        self._paths = paths
        self._deadline_s = deadline_s
        self._cache_bytes_max = cache_bytes_max
        self._chains = chains
        self._pool = WorkPool(threads=threads, waiting_max=waiting_max, name="tokenize")
        self._loads: dict[str, Load] = {}
        self._agreement = Agreement(self._ids, open_session)

    async def encode(self, served: ServedModel, call: ApiCall) -> EncodedPrompt:
        """See `Tokenizer`; token ids come back as they are."""
        prompt = call.prompt
        assert not isinstance(prompt, OpaquePrompt), prompt
        if isinstance(prompt, TokenPrompt):
            encoded = _encoded(prompt.packed, call, served)
            longest_bytes = max(len(encoded.packed), len(encoded.last_packed))
            if longest_bytes > HASH_OFF_LOOP_BYTES and self._chains is not None:
                # What is not done in time the loop does.
                with contextlib.suppress(PoolFull, TimeoutError):
                    async with asyncio.timeout(self._deadline_s):
                        await self._pool.run(partial(self._remember, encoded, served, call))
            return encoded
        started_s = time.monotonic()
        loaded = self._loaded_already(served)
        packed, texts = None, None
        short = loaded is not None and at_once.is_short(prompt, call)
        if loaded is not None and short and loaded.renders_directly(prompt):
            texts = loaded.texts(prompt)
            packed = loaded.ids_at_once(prompt, texts) if at_once.are_short(texts) else None
        if packed is not None:
            encoded = _encoded(packed, call, served)
        else:
            work = partial(self._encode, prompt, texts, call, served)
            encoded = await self._in_time(served, work)
        telemetry.TOKENIZER_SECONDS.observe(time.monotonic() - started_s)
        return encoded

    async def run(self, models: Callable[[], Mapping[str, ServedModel]]) -> None:
        """Load tokenizers of known models ahead of their first request, until cancelled.

        Those that are loaded are compared with the engines'.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_early(models))
            tasks.create_task(self._agreement.run(models, self._is_loaded))

    def loading(self, models: Mapping[str, ServedModel]) -> list[str]:
        """Models whose tokenizer will soon be there: their first requests would get no hits."""
        return sorted(
            name
            for name, served in models.items()
            if self._worth_loading_early(served) and not self._load(served).settled()
        )

    def annotate(self, fleet_view: dict[str, Any], models: Mapping[str, ServedModel]) -> None:
        """Add `tokenizer` to every fleet and `tokenizer_agrees` to every instance of a view."""
        for fleet in fleet_view["fleets"]:
            served = models.get(fleet["model_scope"])
            load = None if served is None else self._loads.get(self._root(served))
            if served is not None and load is not None:
                fleet["tokenizer"] = {"root": self._root(served)} | load.view()
            else:  # nobody needed it yet
                fleet["tokenizer"] = None
            self._agreement.annotate(fleet)

    def close(self) -> None:
        """Let the threads end; requests that still wait for one are cancelled."""
        self._pool.close()

    # -- work in threads --------------------------------------------------------------------------

    def _encode(
        self,
        prompt: ChatPrompt | TextPrompt,
        texts: Sequence[str] | None,
        call: ApiCall,
        served: ServedModel,
        loaded: LoadedTokenizer,
    ) -> EncodedPrompt:
        if texts is None:
            texts = loaded.texts(prompt)
        encoded = _encoded(loaded.ids(prompt, texts), call, served)
        self._remember(encoded, served, call)
        return encoded

    def _remember(self, encoded: EncodedPrompt, served: ServedModel, call: ApiCall) -> None:
        """The router asks for the same hashes in a moment, on the loop."""
        if self._chains is not None:
            self._chains.of(encoded.packed, served, call)
            if encoded.last_packed is not encoded.packed:
                self._chains.of(encoded.last_packed, served, call)

    async def _ids(self, served: ServedModel, prompt: ChatPrompt | TextPrompt) -> bytes:
        """Token ids of a probe; raises TokensUnknown."""
        packed = await self._in_time(served, lambda loaded: loaded.encode(prompt))
        return packed[0]

    async def _in_time(self, served: ServedModel, work: Callable[[LoadedTokenizer], T]) -> T:
        """Done by the model's tokenizer in a thread. What is late still fills the caches."""
        try:
            async with asyncio.timeout(self._deadline_s):
                loaded = await self._loaded(served)
                return await self._pool.run(partial(work, loaded))
        except TimeoutError:
            raise TokensUnknown(
                DegradedCause.TOKENIZER_SLOW, f"tokenizing took longer than {self._deadline_s:g} s"
            ) from None
        except PoolFull:
            raise TokensUnknown(
                DegradedCause.TOKENIZER_BUSY, "too many prompts wait to be tokenized"
            ) from None

    # -- tokenizers -------------------------------------------------------------------------------

    async def _load_early(self, models: Callable[[], Mapping[str, ServedModel]]) -> None:
        while True:
            for served in list(models().values()):
                if self._worth_loading_early(served):
                    self._load(served)
            await asyncio.sleep(WARM_UP_S)

    def _is_loaded(self, served: ServedModel) -> bool:
        return self._loaded_already(served) is not None

    def _loaded_already(self, served: ServedModel) -> LoadedTokenizer | None:
        load = self._loads.get(self._root(served))
        return load.tokenizer if load is not None and load.done.is_set() else None

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

    def _load(self, served: ServedModel) -> Load:
        root = self._root(served)
        load = self._loads.get(root)
        if load is None or load.expired():
            load = self._loads[root] = Load(
                root, served.fleet.model_scope, cache_bytes_max=self._cache_bytes_max
            )
        return load

    async def _loaded(self, served: ServedModel) -> LoadedTokenizer:
        load = self._load(served)
        await load.done.wait()
        if load.tokenizer is None:
            raise TokensUnknown(DegradedCause.TOKENIZER_UNAVAILABLE, load.problem)
        return load.tokenizer


def _encoded(packed: tuple[bytes, ...], call: ApiCall, served: ServedModel) -> EncodedPrompt:
    keep = call.truncate_prompt_tokens
    if keep == -1 and served.max_model_len_tokens is not None:
        # An answer whose length is told has room for one token; vLLM sees to the others later.
        keep = max(1, served.max_model_len_tokens - (1 if call.output_tokens_max else 0))
    if keep:
        packed = tuple(one[-keep * TOKEN_BYTES :] for one in packed)
    counts = [len(one) // TOKEN_BYTES for one in packed]
    full = [one for one in packed if len(one) >= served.fleet.block_size_tokens * TOKEN_BYTES]
    return EncodedPrompt(
        packed=packed[0],
        prompt_tokens=max(1, sum(counts)),
        longest_tokens=max(counts),
        last_packed=(full or packed[:1])[-1],
    )
