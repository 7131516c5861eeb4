"""Token ids are the engine's, come within a deadline, and never fail a request."""

import asyncio
import threading
from typing import Any

import pytest
from builders import make_fleet_record, make_instance
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from indexer.contract.block_hash import pack_tokens
from router.eligibility import Roster
from router.errors import DegradedCause, TokensUnknown
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, ChatPrompt, Endpoint, Prompt, TextPrompt, TokenPrompt
from router.tokens.tokenize import LoadedTokenizer, ModelTokenizers, estimate

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
        "endpoint": Endpoint.CHAT,
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


@pytest.mark.parametrize(("keep", "expected"), [(2, [8, 9]), (-1, [6, 7, 8, 9]), (99, range(10))])
async def test_a_truncated_prompt_keeps_its_end(
    tokenizers: ModelTokenizers, keep: int, expected: Any
) -> None:
    """As the engine will truncate it; -1 stands for the model's limit."""
    prompt = TokenPrompt(packed=(pack_tokens(range(10)),))
    model = served("/nonexistent", max_model_len_tokens=4)
    encoded = await tokenizers.encode(model, call(prompt, truncate_prompt_tokens=keep))
    assert encoded.packed == pack_tokens(list(expected))


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


async def test_a_slow_tokenizer_meets_its_deadline(root: str) -> None:
    """The wait for a thread counts."""
    tokenizers = ModelTokenizers(paths={}, threads=1, deadline_s=30.0)
    await tokenizers.encode(served(root), call(chat("user")))  # loaded
    tokenizers._deadline_s = 0.05
    release = threading.Event()
    occupied = asyncio.get_running_loop().run_in_executor(tokenizers._pool, release.wait, 10)
    assert await unknown(tokenizers, served(root), chat("user")) is DegradedCause.TOKENIZER_SLOW
    release.set()
    await occupied
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
        await asyncio.sleep(0)
        await tokenizers._loads[root].done.wait()
        task.cancel()
    assert isinstance(tokenizers._loads[root].tokenizer, LoadedTokenizer)
    assert set(tokenizers._loads) == {root}
    tokenizers.close()


def test_an_estimate_has_a_length_and_nothing_to_look_up() -> None:
    """Four bytes a token, at least one token, and no more than the model takes."""
    assert estimate(call(chat("user")), None).prompt_tokens == 10
    assert estimate(call(chat("user"), body=b""), None).prompt_tokens == 1
    assert estimate(call(chat("user")), 5).prompt_tokens == 5
    assert estimate(call(chat("user")), None).packed == b""
