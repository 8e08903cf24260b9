"""The model families that can be read: their configs, their tensors' names, and how files store their weights.

Configs are dicts in transformers' words. Nothing is guessed: a family, a scaling of positions or a tensor that is not
known here is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sebp_edge.errors import ModelError
from sebp_edge.gguf.file import GgufFile

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Frequencies of rotary embeddings, which become part of the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3.1 to 3.3 share these; their files contain only the resulting factors.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The largest known heads have 512 features.
_MAX_HEAD_SIZE = 4096
# llama.cpp recognises the 27B models of Gemma 2 and 3, which scale attention differently, by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        model_type: transformers' name.
        names: the tensors of a block: llama.cpp's names, and transformers'.
        has_pairs: whether rows of queries and keys are stored in pairs that rotate together, as llama.cpp's kernel for
            some families expects, and not in halves.
        has_norms_from_one: whether files store 1 + w for the weight w of a norm.
        config: returns what the family adds to the common config.
    """

    model_type: str
    names: dict[str, str]
    has_pairs: bool = False
    has_norms_from_one: bool = False
    config: Callable[[GgufFile, dict], dict[str, Any]] = lambda file, common: {}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a file's model.

    Raises:
        ModelError: it is no model of a known family, or asks for something that is not known here.
    """
    family = _family_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.name!r} has no embedding; expected a file with a whole model.")
    if file.get(_key(file, "expert_count"), int, 0):
        raise ModelError(f"{file.name!r} is a mixture of experts, which cannot be read; choose a dense model.")
    hidden, heads = _count(file, "embedding_length"), _count(file, "attention.head_count")
    common = {
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": _count(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": _count(file, "attention.key_length", hidden // heads),
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    common["rope_parameters"] = _rope(file, common)
    return common | family.config(file, common)


def weight_names(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of each weight of its model, by transformers' name.

    Raises:
        ModelError: the file has tensors that its family does not have.
    """
    family, found = _family_of(file), {}
    for name in file.tensors:
        if name in _ROPE_TENSORS:
            continue
        renamed = _renamed(name, family.names)
        if renamed is None:
            kind = "vision or audio layers" if name.startswith(("v.", "mm.", "a.")) else f"the tensor {name[:60]!r}"
            raise ModelError(
                f"{file.name!r} has {kind}, which the family {file.architecture!r} does not have here; choose a text "
                "model."
            )
        found[renamed] = name
    return found


def read_weight(file: GgufFile, name: str, dtype: torch.dtype) -> Tensor:
    """Returns a weight as transformers' model has it.

    Args:
        name: the file's name of it.
    """
    family = _family_of(file)
    if family.has_norms_from_one and name.endswith("norm.weight"):
        return (file.read(name) - 1).to(dtype)
    weight = file.read(name, dtype)
    part = name.split(".")[-2]
    if family.has_pairs and part in ("attn_q", "attn_k"):
        heads = _count(file, "attention.head_count")
        heads = heads if part == "attn_q" else _count(file, "attention.head_count_kv", heads)
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
    return weight


def _renamed(name: str, names: dict[str, str]) -> str | None:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    match name.split("."):
        case ["blk", number, part, "weight" | "bias" as kind] if number.isdecimal() and part in names:
            return f"model.layers.{number}.{names[part]}.{kind}"
    return None


def _family_of(file: GgufFile) -> Family:
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ModelError(f"{file.name!r} contains a GGUF {kind[:20]}, not a model; give the base model's file.")
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{file.name!r} is a part of a split model; join the parts with llama-gguf-split --merge.")
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(
            f"{file.name!r} is a model of the family {file.architecture[:40]!r}; expected {', '.join(FAMILIES)}."
        )
    return family


def _key(file: GgufFile, name: str) -> str:
    return f"{file.architecture}.{name}"


def _count(file: GgufFile, name: str, default: int | None = None) -> int:
    value = file.get(_key(file, name), int, default)
    if value is None or not 0 < value < 2**31:
        raise ModelError(f"{file.name!r} has {_key(file, name)} {value}; expected a positive number.")
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    value = file.get(_key(file, name), float, default)
    if value is None or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{file.name!r} has {_key(file, name)} {value}; expected a positive number.")
    return value


def _token_ids(file: GgufFile) -> dict[str, Any]:
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "padding")}
    # A turn of a chat may end with a token of its own.
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }


def _rope(file: GgufFile, common: dict) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding."""
    rope = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base", 10_000.0)}
    size = _count(file, "rope.dimension_count", common["head_dim"])
    if size > _MAX_HEAD_SIZE:
        raise ModelError(f"{file.name!r} has heads of {size} features; expected at most {_MAX_HEAD_SIZE}.")
    if size != common["head_dim"]:
        if file.architecture != "phi3":
            raise ModelError(f"{file.name!r} rotates {size} of {common['head_dim']} features of a head; expected all.")
        rope["partial_rotary_factor"] = size / common["head_dim"]
    for name in _ROPE_TENSORS:
        if name in file.tensors and file.tensors[name].shape != (size // 2,):
            raise ModelError(
                f"{file.name!r} has {file.tensors[name].num_weights} factors of positions, not {size // 2}."
            )
    scaling = file.get(_key(file, "rope.scaling.type"), str, "none")
    if "rope_factors_long.weight" in file.tensors and file.architecture == "phi3":
        return rope | _long_rope(file, common["max_position_embeddings"])
    if scaling == "linear":
        return rope | {"rope_type": "linear", "factor": _number(file, "rope.scaling.factor")}
    if scaling != "none":
        raise ModelError(f"{file.name!r} scales positions by {scaling[:20]!r}; expected none or linear.")
    return rope | _llama3_rope(file, size, rope["rope_theta"]) if "rope_freqs.weight" in file.tensors else rope


def _llama3_rope(file: GgufFile, size: int, theta: float) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's scaling, if they give the factors in the file."""
    factors = file.read("rope_freqs.weight")
    factor = float(factors.max())
    low, high, context = _LLAMA3_ROPE.values()
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    share = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=1e-4):
        raise ModelError(f"{file.name!r} scales positions in a way that is not known; expected that of Llama 3.1.")
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3_ROPE}


def _long_rope(file: GgufFile, context: int) -> dict[str, Any]:
    factors = {name: file.read(f"rope_factors_{name}.weight").tolist() for name in ("long", "short")}
    original = _count(file, "rope.scaling.original_context_length")
    rope = {
        "rope_type": "longrope",
        "long_factor": factors["long"],
        "short_factor": factors["short"],
        "original_max_position_embeddings": original,
    }
    factor = _number(file, "rope.scaling.attn_factor", 1.0)
    usual = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0
    # Only where it is not what transformers computes by itself, since transformers 4 refuses to be told.
    return rope if math.isclose(factor, usual, rel_tol=1e-6) else rope | {"attention_factor": factor}


def _llama(file: GgufFile, common: dict) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _phi3(file: GgufFile, common: dict) -> dict[str, Any]:
    window = file.get(_key(file, "attention.sliding_window"), int, 0)
    original = common["rope_parameters"].get("original_max_position_embeddings", common["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _gemma(file: GgufFile, common: dict) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _attention_scale(file: GgufFile, common: dict) -> float:
    if common["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        return common["hidden_size"] / common["num_attention_heads"]
    return common["head_dim"]


def _gemma2(file: GgufFile, common: dict) -> dict[str, Any]:
    return _gemma(file, common) | {
        "query_pre_attn_scalar": _attention_scale(file, common),
        "sliding_window": _count(file, "attention.sliding_window", 4096),
        "attn_logit_softcapping": _number(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _number(file, "final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, common: dict) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 10_000.0)}
    return _gemma(file, common) | {
        "query_pre_attn_scalar": _attention_scale(file, common),
        "sliding_window": _count(file, "attention.sliding_window", 1024),
        "sliding_window_pattern": _count(file, "attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
    }


# By llama.cpp's names. "llama" includes Mistral, whose files have no other name.
FAMILIES = {
    "llama": Family("llama", _NAMES, has_pairs=True, config=_llama),
    "qwen2": Family("qwen2", _NAMES),
    "qwen3": Family("qwen3", _NAMES | _HEAD_NORMS),
    "smollm3": Family("smollm3", _NAMES, has_pairs=True),
    "phi3": Family("phi3", _NAMES | _FUSED, config=_phi3),
    "gemma": Family("gemma", _NAMES, has_norms_from_one=True, config=_gemma),
    "gemma2": Family("gemma2", _NAMES | _FOUR_NORMS, has_norms_from_one=True, config=_gemma2),
    "gemma3": Family("gemma3_text", _NAMES | _HEAD_NORMS | _FOUR_NORMS, has_norms_from_one=True, config=_gemma3),
}
