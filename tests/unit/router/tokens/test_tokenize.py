"""Token ids are the engine's, come within a deadline, and never fail a request."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from builders import make_fleet_record, make_instance
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from waiting import until

from indexer.contract.block_hash import pack_tokens
from router.eligibility import Roster
from router.errors import DegradedCause, RequestInvalid, TokensUnknown
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.requests.prompt_limits import refuse_too_long
from router.tokens.at_once import BYTES_MAX, ITEMS_MAX, VALUES_MAX, is_short
from router.tokens.cuts import FOUND_MAX
from router.tokens.encoder import NEW_AT_ONCE_BYTES, Encoder
from router.tokens.hash_chains import HashChains
from router.tokens.loaded import LoadedTokenizer
from router.tokens.tokenize import HASH_OFF_LOOP_BYTES, ModelTokenizers

WORDS = ["<s>", "user", "assistant", "hello", "world", "tool", "think"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if tools %}tool {% endif %}{% if thinking %}think {% endif %}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer of seven words that puts <s> in front of plain texts."""
    path = tmp_path_factory.mktemp("tokenizer")
    ids = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return str(path)


PARTS = [{"type": "text", "text": "hello"}] * ITEMS_MAX
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}] * ITEMS_MAX


def served(root: str, **changes: Any) -> ServedModel:
    """Model m whose tokenizer comes from `root`."""
    values: dict[str, Any] = {
        "name": "m",
        "fleet": make_fleet_record(),
        "adapter": None,
        "max_model_len_tokens": 4096,
        "model_root": root,
        "roster": Roster.of({0: make_instance()}),
    }
    return ServedModel(**values | changes)


def call(prompt: Prompt, **changes: Any) -> ApiCall:
    """A call whose body does not matter."""
    values: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "body": b"x" * 40,
        "headers": (),
        "request_id": "r",
        "model": "m",
        "stream": False,
        "prompt": prompt,
    }
    return ApiCall(**values | changes)


def chat(*roles: str, **changes: Any) -> ChatPrompt:
    """A message `hello` from each role."""
    messages = [{"role": role, "content": "hello"} for role in roles]
    return ChatPrompt(messages=messages, **changes)


def long_chat(role: str) -> ChatPrompt:
    """More new text than is tokenized at once."""
    return ChatPrompt(messages=[{"role": role, "content": "hello " * NEW_AT_ONCE_BYTES}])


@pytest.fixture
def tokenizers() -> Any:
    """Without a mapping of the operator."""
    made = ModelTokenizers(paths={}, threads=2, deadline_s=30.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (chat("user"), ["user", "hello", "assistant"]),
        (chat("user", add_generation_prompt=False), ["user", "hello"]),
        (chat("user", tools=[{"type": "function"}]), ["user", "hello", "tool", "assistant"]),
        (
            chat("user", template_kwargs={"thinking": True}),
            ["user", "hello", "think", "assistant"],
        ),
        (chat("user", template_kwargs={"tokenize": True}), ["user", "hello", "assistant"]),
        (chat("user", add_special_tokens=True), ["<s>", "user", "hello", "assistant"]),
        (TextPrompt(texts=("hello world",)), ["<s>", "hello", "world"]),
        (TextPrompt(texts=("hello",), add_special_tokens=False), ["hello"]),
        (TextPrompt(texts=("hello " * 9,)), ["<s>", *["hello"] * 9]),  # no truncation of its own
    ],
)
async def test_ids_are_those_of_template_and_tokenizer(
    tokenizers: ModelTokenizers, root: str, prompt: Prompt, expected: list[str]
) -> None:
    """Special tokens for plain text, and none but the template's for a chat."""
    encoded = await tokenizers.encode(served(root), call(prompt))
    assert encoded.packed == pack_tokens([WORDS.index(word) for word in expected])
    assert encoded.prompt_tokens == encoded.longest_tokens == len(expected)


async def test_several_prompts_are_counted_together(tokenizers: ModelTokenizers, root: str) -> None:
    """Looked up by the first, new prefill tokens over all, the limit for the longest."""
    prompt = TextPrompt(texts=("hello", "hello world"), add_special_tokens=False)
    encoded = await tokenizers.encode(served(root), call(prompt))
    assert encoded.packed == pack_tokens([3])
    assert (encoded.prompt_tokens, encoded.longest_tokens) == (3, 2)


@pytest.mark.parametrize(("lengths", "last"), [((32, 16, 15), 1), ((15, 14), 0), ((16, 32), 1)])
async def test_the_last_prompt_with_a_full_block_is_known(
    tokenizers: ModelTokenizers, lengths: tuple[int, ...], last: int
) -> None:
    """Its blocks tell when all are computed; of short ones any will do."""
    prompts = tuple(
        pack_tokens(range(number, number + length)) for number, length in enumerate(lengths)
    )
    encoded = await tokenizers.encode(served("x"), call(TokenPrompt(packed=prompts)))
    assert (encoded.packed, encoded.last_packed) == (prompts[0], prompts[last])


@pytest.mark.parametrize(
    ("keep", "output_tokens_max", "expected"),
    [
        (2, None, [8, 9]),
        (-1, None, [6, 7, 8, 9]),
        (-1, 0, [6, 7, 8, 9]),
        (-1, 3, [7, 8, 9]),
        (99, None, range(10)),
    ],
)
async def test_a_truncated_prompt_keeps_its_end(
    tokenizers: ModelTokenizers, keep: int, output_tokens_max: int | None, expected: Any
) -> None:
    """As vLLM will: -1 is the model's limit, less a token where the answer is bounded."""
    prompt = TokenPrompt(packed=(pack_tokens(range(10)),))
    model = served("/nonexistent", max_model_len_tokens=4)
    told = call(prompt, truncate_prompt_tokens=keep, output_tokens_max=output_tokens_max)
    encoded = await tokenizers.encode(model, told)
    assert encoded.packed == pack_tokens(list(expected))


async def test_a_prompt_that_the_engine_cuts_is_not_too_long(tokenizers: ModelTokenizers) -> None:
    """It fills the model's whole context, and vLLM answers; the same prompt uncut it refuses."""
    model, whole = served("/x", max_model_len_tokens=4), pack_tokens(range(4))
    cut = call(TokenPrompt(packed=(whole,)), truncate_prompt_tokens=-1)
    refuse_too_long(await tokenizers.encode(model, cut), model, cut)
    uncut = call(TokenPrompt(packed=(whole,)))
    with pytest.raises(RequestInvalid, match="at least one of them for the answer"):
        refuse_too_long(await tokenizers.encode(model, uncut), model, uncut)


async def test_token_ids_need_no_tokenizer(tokenizers: ModelTokenizers) -> None:
    """They are taken as they are."""
    packed = pack_tokens([5, 6])
    encoded = await tokenizers.encode(served("/nonexistent"), call(TokenPrompt(packed=(packed,))))
    assert (encoded.packed, encoded.prompt_tokens) == (packed, 2)


async def unknown(tokenizers: ModelTokenizers, model: ServedModel, prompt: Prompt) -> DegradedCause:
    """Why the token ids of a prompt are not to be had."""
    with pytest.raises(TokensUnknown) as caught:
        await tokenizers.encode(model, call(prompt))
    return caught.value.cause


async def test_a_missing_tokenizer_says_so(tokenizers: ModelTokenizers) -> None:
    """Each time at once: it is not loaded again for every request."""
    model = served("/nonexistent/model")
    for _ in range(2):
        reason = await unknown(tokenizers, model, chat("user"))
        assert reason is DegradedCause.TOKENIZER_UNAVAILABLE


@pytest.mark.parametrize(
    "prompt", [chat("system"), chat("user", chat_template="{{ 1 }}")], ids=["raises", "foreign"]
)
async def test_a_template_that_fails_says_so(
    tokenizers: ModelTokenizers, root: str, prompt: ChatPrompt
) -> None:
    """The engine has the last word on the messages; a stranger's template is not rendered here."""
    assert await unknown(tokenizers, served(root), prompt) is DegradedCause.TEMPLATE_FAILED


@asynccontextmanager
async def all_threads_busy(tokenizers: ModelTokenizers) -> AsyncIterator[None]:
    """The one thread of a pool works for as long as the context lasts."""
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tokenizers._pool.run(work))
        try:
            await until(begun.is_set, "the thread is busy")
            yield
        finally:
            release.set()


async def test_a_slow_tokenizer_meets_its_deadline(root: str) -> None:
    """The wait for a thread counts."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    await tokenizers.encode(served(root), call(chat("user")))  # loaded
    tokenizers._deadline_s = 0.05
    async with all_threads_busy(tokenizers):
        cause = await unknown(tokenizers, served(root), long_chat("user"))
    assert cause is DegradedCause.TOKENIZER_SLOW
    tokenizers.close()


@pytest.mark.parametrize(
    ("prompt", "at_once"),
    [
        (chat("user", "assistant", "user"), True),
        (TextPrompt(texts=("hello world",)), True),
        (chat(*["user"] * (ITEMS_MAX + 1)), False),
        (chat("user", tools=[{"type": "function"}] * ITEMS_MAX), False),
        (ChatPrompt(messages=[{"role": "user", "content": PARTS}]), False),
        (ChatPrompt(messages=[{"role": "assistant", "content": "", "tool_calls": CALLS}]), False),
        (ChatPrompt(messages=[{"role": "user", "content": "<s>" * (FOUND_MAX + 1)}]), False),
        (chat("user", template_kwargs={"padding": True}), False),
        (chat("user", continue_final_message=True, add_generation_prompt=False), False),
        (TextPrompt(texts=("hello",) * (ITEMS_MAX + 1)), False),
        (long_chat("user"), False),
        (TextPrompt(texts=("hello " * NEW_AT_ONCE_BYTES,)), False),
    ],
)
async def test_only_what_takes_no_time_is_done_on_the_loop(
    root: str, prompt: Prompt, at_once: bool
) -> None:
    """Few messages and parts, few added tokens, little new text: all else needs a thread."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    await tokenizers.encode(served(root), call(chat("user")))  # loaded
    tokenizers._deadline_s = 0.05
    async with all_threads_busy(tokenizers):
        if at_once:
            encoded = await tokenizers.encode(served(root), call(prompt))
            assert encoded.prompt_tokens > 1
        else:
            cause = await unknown(tokenizers, served(root), prompt)
            assert cause is DegradedCause.TOKENIZER_SLOW
    tokenizers.close()


@pytest.mark.parametrize(("count", "short"), [(500, True), (VALUES_MAX, False)])
def test_one_tool_can_be_one_long_list(count: int, short: bool) -> None:
    """A template may write every value of it out; commas of long texts do not count."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [[]] * count}}}]
    prompt = chat("user", tools=tools)
    assert is_short(prompt, call(prompt, body=json.dumps(tools).encode())) is short
    text = "so, " * VALUES_MAX
    talk = ChatPrompt(messages=[{"role": "user", "content": text}])
    assert is_short(talk, call(talk, body=json.dumps(talk.messages).encode()))


@pytest.mark.parametrize("cache_bytes_max", [0, 1 << 20])
def test_at_once_means_the_same_ids(root: str, cache_bytes_max: int) -> None:
    """Of little text, also where there is nothing to be remembered; of much when it is known."""
    backend = LoadedTokenizer.load(root, cache_bytes_max=0).encoder._backend
    encoder = Encoder(backend, cache_bytes_max=cache_bytes_max)
    little, much = ["<s>hello <s>world"], ["<s>" + "hello " * NEW_AT_ONCE_BYTES]
    ids = encoder.encode_at_once(little, add_special_tokens=True)
    assert ids == encoder.encode(little, add_special_tokens=True)
    assert encoder.encode_at_once(much, add_special_tokens=False) is None
    ids = encoder.encode(much, add_special_tokens=False)
    again = encoder.encode_at_once(much, add_special_tokens=False)
    assert again == (ids if cache_bytes_max else None)


async def test_a_body_of_many_bytes_is_left_to_threads(root: str) -> None:
    """However little of it is new."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    await tokenizers.encode(served(root), call(chat("user")))
    tokenizers._deadline_s = 0.05
    big = call(chat("user"), body=b"x" * (BYTES_MAX + 1))
    async with all_threads_busy(tokenizers):
        with pytest.raises(TokensUnknown):
            await tokenizers.encode(served(root), big)
    tokenizers.close()


async def test_a_full_queue_is_said_at_once(root: str) -> None:
    """Nobody waits behind more prompts than are allowed to."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0, waiting_max=1)
    await tokenizers.encode(served(root), call(chat("user")))  # loaded
    async with all_threads_busy(tokenizers), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(tokenizers.encode(served(root), call(long_chat("user"))))
        await until(lambda: tokenizers._pool._pieces == 2, "one waits")
        async with asyncio.timeout(5):
            cause = await unknown(tokenizers, served(root), long_chat("tool"))
        waiting.cancel()
    assert cause is DegradedCause.TOKENIZER_BUSY
    tokenizers.close()


async def test_what_came_too_late_is_remembered(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that has begun goes on past its deadline, so that the next turn need not do it."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    await tokenizers.encode(served(root), call(chat("user")))
    encoder = tokenizers._loads[root].tokenizer.encoder  # type: ignore[union-attr]
    late, release, ids = long_chat("tool"), threading.Event(), LoadedTokenizer.ids

    def slowly(loaded: LoadedTokenizer, *of: Any) -> tuple[bytes, ...]:
        release.wait(30)
        return ids(loaded, *of)

    monkeypatch.setattr(LoadedTokenizer, "ids", slowly)
    tokenizers._deadline_s, before = 0.05, encoder.cache_bytes
    assert await unknown(tokenizers, served(root), late) is DegradedCause.TOKENIZER_SLOW
    assert encoder.cache_bytes == before
    release.set()
    await until(lambda: encoder.cache_bytes > before, "the late result is remembered")
    tokenizers.close()


@pytest.mark.parametrize(
    "prompt", [TextPrompt(texts=("\ud800",)), ChatPrompt(messages=[{"role": "\udfff"}])]
)
async def test_half_a_character_has_no_ids(
    tokenizers: ModelTokenizers, root: str, prompt: Prompt
) -> None:
    """JSON can say it and UTF-8 cannot; the engine has the last word on it."""
    assert await unknown(tokenizers, served(root), prompt) is DegradedCause.TEXT_REFUSED


async def test_hashes_are_made_in_the_thread(root: str) -> None:
    """When the router asks for them on its loop, they are there."""
    chains = HashChains()
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0, chains=chains)
    for prompt in (
        TextPrompt(texts=("hello " * 2048,), add_special_tokens=False),
        TokenPrompt(packed=(bytes(2 * HASH_OFF_LOOP_BYTES),)),
        TokenPrompt(packed=(b"\1" * 64, b"\2" * 2 * HASH_OFF_LOOP_BYTES)),
    ):
        before = chains.held_bytes
        encoded = await tokenizers.encode(served(root), call(prompt))
        held = chains.held_bytes
        assert held > before
        assert chains.of(encoded.packed, served(root), call(prompt))
        assert chains.of(encoded.last_packed, served(root), call(prompt))
        assert chains.held_bytes == held
    tokenizers.close()


async def test_operators_see_the_state_of_each_tokenizer(root: str) -> None:
    """Loaded, or why not; None where nobody needed it yet."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    models = {"m": served(root), "gone": served("/nonexistent/model"), "idle": served("idle")}
    for name in ("m", "gone"):
        with contextlib.suppress(TokensUnknown):
            await tokenizers.encode(models[name], call(chat("user")))
    view: dict[str, Any] = {
        "fleets": [{"model_scope": name, "instances": []} for name in ("m", "gone", "idle")]
    }
    tokenizers.annotate(view, models)
    loaded, missing, idle = (fleet["tokenizer"] for fleet in view["fleets"])
    assert (loaded["state"], loaded["whole_reason"], loaded["root"]) == ("loaded", None, root)
    assert (missing["state"], bool(missing["problem"])) == ("unavailable", True)
    assert idle is None
    tokenizers.close()


async def test_the_operators_mapping_comes_first(root: str) -> None:
    """By name, or by the fleet's scope for its other names."""
    tokenizers = ModelTokenizers(paths={"m": root}, threads=1, deadline_s=30.0)
    for name in ("m", "alias"):
        model = served("/nonexistent", name=name)
        assert (await tokenizers.encode(model, call(chat("user")))).prompt_tokens == 3
    tokenizers.close()


async def test_known_models_are_loaded_ahead(root: str) -> None:
    """The first request need not wait; a made-up root is left alone."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    models = {"m": served(root), "sim": served("sim", name="sim")}
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tokenizers.run(lambda: models))
        await until(lambda: root in tokenizers._loads, "the load has begun")
        await tokenizers._loads[root].done.wait()
        task.cancel()
    assert isinstance(tokenizers._loads[root].tokenizer, LoadedTokenizer)
    assert set(tokenizers._loads) == {root}
    tokenizers.close()
