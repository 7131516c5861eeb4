"""Make a tiny model with random weights: `python tiny_model.py FOLDER`, in vLLM's environment.

Two layers of Qwen2, a byte-level BPE vocabulary learnt from Python's own library, a chat template,
and two random LoRA adapters in PEFT's format. About 2 MB; the same weights and ids every time on
one Python release, because the seeds are fixed and the text is the release's. No network.
"""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY: Final = 4096
CONTEXT_TOKENS_MAX: Final = 4096
HIDDEN: Final = 64
LAYERS: Final = 2
CORPUS_FILES: Final = 150
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADAPTERS: Final = ("adapter-a", "adapter-b")
LORA_RANK: Final = 8
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE tokenizer from this interpreter's standard library."""
    learnt = Tokenizer(models.BPE(byte_fallback=False))
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))[:CORPUS_FILES]
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=learnt,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT_TOKENS_MAX,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model() -> Any:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def save_adapter(folder: Path, seed: int) -> None:
    """Write a random adapter of the query and value projections in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(
            shape, generator=random
        )
        for layer in range(LAYERS)
        for name in config["target_modules"]
        for side, shape in (("A", (LORA_RANK, HIDDEN)), ("B", (HIDDEN, LORA_RANK)))
    }
    save_file(weights, str(folder / "adapter_model.safetensors"))


def main(folder: Path) -> None:
    """Write model, tokenizer and adapters."""
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
    for seed, name in enumerate(ADAPTERS, start=1):
        save_adapter(folder / name, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
