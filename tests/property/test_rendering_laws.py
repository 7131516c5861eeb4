"""Chats are rendered to the character as transformers' `apply_chat_template` renders them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import gpt2
from transformers import PreTrainedTokenizerFast

from router.errors import TokensUnknown
from router.requests.api_call import ChatPrompt
from router.requests.chat_messages import chat_prompt, chat_tools
from router.tokens.chat_template import conversation, iterates_parts
from router.tokens.encoder import Encoder
from router.tokens.loaded import LoadedTokenizer
from router.tokens.rendering import Rendering
from router.tokens.system_roles import SystemRoles

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{%- if m['role'] == 'tool' and loop.first -%}"
    "{{ raise_exception('nobody asked for it') }}{%- endif -%}"
    "[{{ m['role'] | upper }}]{{ m['content'].strip() }}{{ eos_token }}{%- endfor -%}"
)
PARTS = (
    "{%- macro shown(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}{{ part.text if part.type == 'text' else '?' }}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{{ m.role }}:{{ shown(m.content) }};"
    "{%- for part in m.content -%}{{ loop.last }}{%- endfor -%}{%- endfor -%}"
)
THINKING = (
    "{%- set ns = namespace(last=-1, seen=[]) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.reasoning_content is defined and loop.index0 > ns.last -%}"
    "<think>{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.get('reasoning') }}</think>"
    "{%- endif -%}"
    "{{ m | tojson }}{%- if m.items is defined -%}{{ m.items() | list }}{%- endif -%}"
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{%- endfor -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
)
EVERYTHING = (
    "{{ tools | tojson(indent=1) if tools is not none else 'none' }}{{ documents | tojson }}"
    "{{ dict(a=1) }}{{ strftime_now('%Y') }}{{ pad_token }}{{ unknown }}{{ reasoning_effort }}"
    "{%- for m in messages -%}{%- if m.name -%}{%- continue -%}{%- endif -%}"
    "{{ m.role }}{{ m.tools }}{{ m['tool_call_id'] }}{{ m.keys() | list }}{{ m.unknown }}"
    "{{ m.content.upper() }}{{ '%s' | format(m.content) }}{{ '{}'.format(m) }}{%- endfor -%}"
)
MUTATING = "{%- set _ = messages.append(1) -%}{{ messages }}"
ESCAPING = "{{ messages.__class__ }}{{ messages[0].__class__ }}{{ messages[0]['__class__'] }}"

TEMPLATES: dict[str, Any] = {
    "plain": PLAIN,
    "strict": STRICT,
    "parts": PARTS,
    "thinking": THINKING,
    "everything": EVERYTHING,
    "mutating": MUTATING,
    "escaping": ESCAPING,
    "developer": PLAIN + "{# 'developer' #}",
    "two": {"default": PLAIN, "tool_use": EVERYTHING},
    "no default": {"tool_use": PLAIN},
}
UNUSABLE: dict[str, Any] = {"broken": "{% for m in messages %}", "none": None}


def loaded(template: Any) -> LoadedTokenizer:
    """A tokenizer with this template."""
    backend = gpt2()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    return LoadedTokenizer(
        tokenizer=fast,
        rendering=Rendering(fast),
        encoder=Encoder(backend, cache_bytes_max=0),
        iterates_parts=any(map(iterates_parts, texts)),
        system_roles=SystemRoles.of(texts),
    )


LOADED = {name: loaded(template) for name, template in (TEMPLATES | UNUSABLE).items()}


def outcome(render: Callable[[], str]) -> str | None:
    """The text; None where it is refused."""
    try:
        return render()
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None


def as_transformers(one: LoadedTokenizer, prompt: ChatPrompt) -> str:
    """The same by `apply_chat_template` alone."""
    names = prompt.template_kwargs | {
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }
    for reserved in ("conversation", "tools", "documents", "chat_template", "tokenize"):
        names.pop(reserved, None)
    messages = prompt.messages
    if prompt.merges_system:
        messages = one.system_roles.merged(messages)
    shown = conversation(messages, iterates_parts=one.iterates_parts)
    text = one.tokenizer.apply_chat_template(
        one.system_roles.without_developers(shown),
        tools=prompt.tools,
        documents=prompt.documents,
        tokenize=False,
        **names,
    )
    return str(text)


TEXT = st.sampled_from(["", " ", "hello\n", "<|im_end|>", "\u00e9 {{ x }}", "  b  ", "<b>&'\""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(
    [
        *("enable_thinking", "unknown", "reasoning_effort", "bos_token", "x", "m", "loop", "dict"),
        *("messages", "tools", "documents", "conversation", "conversations", "chat_template"),
        *("tokenize", "padding", "truncation", "return_dict", "return_tensors", "self", "kwargs"),
        *("sanitize_control_tokens", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "max_length", "args", "undefined"),
    ]
)


@st.composite
def message(draw: st.DrawFn) -> dict[str, Any]:
    """As clients send them, most of them complete."""
    role = draw(st.sampled_from(["user", "assistant", "system", "tool", "developer", "other"]))
    part = TEXT.map(lambda text: {"type": "text", "text": text})
    made: dict[str, Any] = {"role": role}
    if draw(st.integers(0, 9)):
        made["content"] = draw(st.one_of(TEXT, TEXT, st.none(), st.lists(part, max_size=2)))
    for name, values in (
        ("reasoning", st.none() | TEXT),
        ("reasoning_content", TEXT),
        ("name", st.none() | TEXT),
        ("tool_call_id", st.none() | TEXT),
        ("tools", JSON),
    ):
        if draw(st.integers(0, 3)) == 0:
            made[name] = draw(values)
    if draw(st.integers(0, 3)) == 0:
        function = st.fixed_dictionaries({"name": TEXT, "arguments": JSON})
        call = st.fixed_dictionaries({"id": TEXT, "type": TEXT, "function": function})
        made["tool_calls"] = draw(st.lists(call, max_size=2))
    return made


@st.composite
def prompts(draw: st.DrawFn) -> ChatPrompt:
    """Whatever can be asked for."""
    tool = st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT, "x": JSON})}
    )
    continues = draw(st.integers(0, 4)) == 0
    made = chat_prompt(
        draw(st.lists(message(), min_size=1, max_size=5)),
        tools=chat_tools(draw(st.none() | st.lists(tool, max_size=2))),
        documents=draw(st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        template_kwargs=draw(st.just({}) | st.dictionaries(NAMES, JSON, max_size=2)),
        add_generation_prompt=draw(st.booleans()) and not continues,
        continue_final_message=continues,
        merges_system=draw(st.booleans()),
    )
    assert isinstance(made, ChatPrompt)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
@given(prompt=prompts())
def test_a_chat_is_rendered_as_transformers_does_it(name: str, prompt: ChatPrompt) -> None:
    """With tools and documents, parts, calls, reasoning and any further names, or refused alike."""
    one = LOADED[name]
    expected = outcome(lambda: as_transformers(one, prompt))
    assert outcome(lambda: one.render(prompt)) == expected


@pytest.mark.parametrize("name", LOADED)
def test_templates_that_compile_are_rendered_directly(name: str) -> None:
    """What raises for every chat is rendered directly too; without a template none is."""
    one = LOADED[name]
    assert one.rendering.direct is (name not in UNUSABLE)
    if name in UNUSABLE:
        with pytest.raises(TokensUnknown):
            one.render(ChatPrompt(messages=[{"role": "user", "content": "x"}]))


def test_a_tokenizer_with_a_way_of_its_own_keeps_it() -> None:
    """Nothing is known of what it does."""
    own = type("Own", (PreTrainedTokenizerFast,), {"apply_chat_template": lambda *_, **__: "own"})
    fast = own(tokenizer_object=gpt2())
    fast.chat_template = PLAIN
    rendering = Rendering(fast)
    assert not rendering.direct
    text = rendering.render(
        [{"role": "user", "content": "x"}],
        tools=None,
        documents=None,
        template_kwargs={},
        add_generation_prompt=True,
        continue_final_message=False,
    )
    assert text == "own"


def test_what_the_library_renders_differently_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found when the tokenizer is loaded: another version may show messages in another way."""
    rendered = PreTrainedTokenizerFast.apply_chat_template
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerBase.apply_chat_template",
        lambda *args, **names: rendered(*args, **names) + "!",
    )
    one = loaded(PLAIN)
    assert not one.rendering.direct
    assert one.render(ChatPrompt(messages=[{"role": "user", "content": "x"}])).endswith("!")


def test_a_template_that_fails_raises_a_typed_error() -> None:
    """Directly rendered or not."""
    with pytest.raises(TokensUnknown, match="nobody asked"):
        LOADED["strict"].render(ChatPrompt(messages=[{"role": "tool", "content": "x"}]))
