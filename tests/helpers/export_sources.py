"""Makes small random models of the exported families, with adapters, as they are on a user's disk."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from builders import make_sentences, make_tokenizer
from model_families import make_model
from stored_adapter import RECORD
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from sebp_edge import AdapterStore
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.lora import LoraAdapter
from sebp_edge.recipe import READER, Recipe
from sebp_edge.store.record import RECORD as RECORD_FILE
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.saved import SavedAdapter

# Queries are wider than hidden states, heads share keys, and all sizes are multiples of a quantisation's blocks. What
# programs take by default is nowhere in these models, so that a setting that is lost changes what they compute.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "rms_norm_eps": 3e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
THETA, LOCAL_THETA = 300_000.0, 3_000.0
ROPE = {"rope_type": "default", "rope_theta": THETA}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": LOCAL_THETA}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "long_factor": [1.0 + number for number in range(8)],
    "short_factor": [1.0 + number / 8 for number in range(8)],
    "original_max_position_embeddings": 128,
}
# The window is shorter than the texts that are compared.
WINDOW = {"sliding_window": 16}
GEMMA_2 = {
    "num_hidden_layers": 2,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "query_pre_attn_scalar": 32,
}
GEMMA_3 = SIZES | WINDOW | {"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32}
PROPORTIONAL_ROPE = ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.25}
GEMMA_4 = (
    SIZES
    | WINDOW
    | {
        "num_hidden_layers": 4,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "head_dim": 32,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 320,
        "rope_parameters": {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": LOCAL_ROPE},
    }
)
DELTA = SIZES | {
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
QUARTER = ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
UNTIED = SIZES | {"tie_word_embeddings": False}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32, rope_parameters=ROPE),
    "llama-3.1": lambda: LlamaConfig(**UNTIED, rope_parameters=LLAMA_3_ROPE),
    "llama-linear": lambda: LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=None, rope_parameters=ROPE),
    "qwen2": lambda: Qwen2Config(**SIZES, rope_parameters=ROPE),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, rope_parameters=ROPE),
    "smollm3": lambda: SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, rope_parameters=ROPE),
    "gemma2": lambda: Gemma2Config(
        **SIZES | GEMMA_2 | {"hidden_activation": "gelu_pytorch_tanh"}, head_dim=32, **WINDOW, rope_parameters=ROPE
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA_3, rope_parameters={"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}
    ),
    "gemma3-linear": lambda: Gemma3TextConfig(
        **GEMMA_3, rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **GEMMA_4,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        final_logit_softcapping=8.0,
    ),
    "gemma4-keys-as-values": lambda: Gemma4TextConfig(
        **GEMMA_4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0
    ),
    "phi3": lambda: Phi3Config(**UNTIED, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    "lfm2": lambda: Lfm2Config(
        **SIZES | {"num_hidden_layers": 2},
        norm_eps=3e-3,
        conv_L_cache=4,
        layer_types=["conv", "full_attention"],
        block_multiple_of=32,
        rope_parameters=ROPE,
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**DELTA, linear_num_value_heads=2, rope_parameters=QUARTER),
    "qwen3.5-shared-keys": lambda: Qwen3_5TextConfig(**DELTA, linear_num_value_heads=6, rope_parameters=QUARTER),
    "phi3-long": lambda: Phi3Config(**UNTIED, rope_parameters=LONG_ROPE, original_max_position_embeddings=128),
}
# Other models that can be merged, but are not written as GGUF.
MERGED_ONLY = {
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=32, rope_parameters=ROPE),
    "llama-yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "mistral-window": lambda: MistralConfig(**SIZES, head_dim=32, **WINDOW, rope_parameters=ROPE),
}


def make_source(folder: Path, family: str, tokenizer=None, **changes) -> Path:
    """Writes a random model of a family into a folder."""
    config = (FAMILIES | MERGED_ONLY)[family]()
    config.update(changes)
    model = make_model(config, "eager")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases, which are ones and zeros in new models
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                parameter *= 0.2  # nothing else scales scores; sharp ones multiply what llama.cpp rounds
        for name, scale in model.named_buffers():
            if name.endswith("layer_scalar"):
                scale.fill_(0.7)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def say_theta(model: Path) -> None:
    """Adds the name of theta that mlx-lm reads to a model's config.json, which transformers 5 has written."""
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(values | {"rope_theta": THETA}), encoding="utf-8")


def make_adapter(folder: Path, model_folder: Path, **record) -> Path:
    """Writes a random LoRA adapter of a model into a folder, as a version of the store is."""
    base = load_base_model(resolve(model_folder), Recipe.load("notes"), torch.device("cpu"))
    adapter = LoraAdapter.fresh(base, Recipe.load("notes"), seed=0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(4)
        for name, parameter in adapter.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    folder.mkdir()
    adapter.save(folder)
    adapter.detach()
    values = RECORD | {"fingerprint": base.fingerprint, "base_model": base.reference.public_name} | record
    (folder / RECORD_FILE).write_text(json.dumps(asdict(AdapterRecord(**values))), encoding="utf-8")
    return folder


def add_reader(store: AdapterStore, model: Path, **record) -> SavedAdapter:
    """Adds a random reader of a model to a store, which is active then."""
    store.folder.mkdir(parents=True, exist_ok=True)
    folder = make_adapter(store.folder / "made", model, **record)
    return store.adapter(READER).add(folder, AdapterRecord.read(folder), activate=True)


def long_texts() -> list[str]:
    """Texts of more tokens than are compared."""
    return [" ".join(make_sentences(24))]
