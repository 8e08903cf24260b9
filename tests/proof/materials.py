"""The texts, models and recipes of the configurations: made here, from a seed, and the same for every checkout."""

import json
import random
from pathlib import Path

import torch
from small_tokenizer import WORDS, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

THINGS = "samovar bicycle canoe piano kettle ladder lantern wagon freezer ladle kayak mower".split()  # noqa: SIM905
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,  # so large that a few steps lower the loss by a tenth
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    # Wide enough for groups of 64 weights, which 4 bits need, and of 32, which rounding needs.
    "wide": LlamaConfig(**(SIZES | {"hidden_size": 64, "intermediate_size": 128})),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, rms_norm_eps=1e-4),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **WINDOWS),
    "padded": RecurrentGemmaConfig(**(SIZES | {"num_hidden_layers": 3}), logits_soft_cap=1.5),
}
# A training of a second, which the gate keeps.
QUICK = {"r": 4, "learning_rate": 2e-2, "epochs": 3, "batch_tokens": 200, "context_length": 64}


def save_models(folder: Path) -> None:
    """Saves each model with its tokenizer in a folder of its name."""
    tokenizer = make_tokenizer()
    for name, config in MODELS.items():
        torch.manual_seed(0)
        _save(AutoModelForCausalLM.from_config(config), tokenizer, folder / name)
    torch.manual_seed(0)
    _save(AutoModelForCausalLM.from_config(MODELS["llama"]).bfloat16(), tokenizer, folder / "bfloat16")
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "initializer_range")}
    torch.manual_seed(0)
    _save(BertForSequenceClassification(BertConfig(**sizes)), tokenizer, folder / "bert")


def _save(model, tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sentences(count: int, words: int = 24, seed: int = 0) -> list[str]:
    """Texts in which one of two neighbouring words mostly stands before the other, as in a language."""
    draw, texts = random.Random(seed), []
    for _ in range(count):
        position, chosen = 0, []
        for _ in range(words):
            position += draw.randint(1, len(WORDS) // 2)
            chosen.append(WORDS[position % len(WORDS)])
        texts.append(" ".join(chosen) + ".")
    return texts


def write_notes(folder: Path, texts: list[str]) -> None:
    """Writes a note for each text; a note that is there already is replaced."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"note-{number:02}.md").write_text(text, encoding="utf-8")


def write_recipe(path: Path, **values) -> None:
    """Writes a recipe of these values, and of the quick one's for the others."""
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in ({**QUICK, **values}).items() if value is not None]
    path.write_text("".join(lines), encoding="utf-8")


def write_records(path: Path, records: list[dict]) -> None:
    """Writes records, a line each."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def questions(count: int) -> list[dict]:
    """Records with a prompt and its completion."""
    return [{"prompt": text[:30], "completion": text[30:90]} for text in sentences(count, seed=1)]


def chats(count: int) -> list[dict]:
    """Conversations of four messages."""
    roles, texts = ("user", "assistant", "user", "assistant"), sentences(4 * count, words=8, seed=2)
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts[at : at + 4], strict=True)]}
        for at in range(0, 4 * count, 4)
    ]
