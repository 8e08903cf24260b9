"""What GGUF calls a model family's tensors and settings, to read files and to write them.

Configs are dicts in transformers' words. Nothing is guessed: a family, a scaling of positions or a tensor that is not
known here is refused. A family is written if llama.cpp computes it exactly as transformers does; a setting that
llama.cpp lacks is refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from torch import Tensor

from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.errors import ExportError, ModelError

_WHOLE = (
    *("model.embed_tokens", "model.norm", "model.embedding_norm", "lm_head"),
    *("model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LINEARS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_LFM2 = (
    *("operator_norm", "ffn_norm", "conv.conv", "conv.in_proj", "conv.out_proj"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "q_layernorm", "k_layernorm")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
)
_DELTA = tuple(
    f"linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
)
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "layer_scalar")
# Tensors that are neither a "weight" nor a "bias" in transformers, as the package gguf looks for them.
_BARE = {
    "linear_attn.A_log": "linear_attn.A_log",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "layer_scalar": "layer_scalar.weight",
}
# Linear attention's tensors with rows, or columns, for each head of values.
_OF_VALUES = {"attn_qkv", "attn_gate", *(f"ssm_{name}" for name in ("conv1d", "alpha", "beta", "a", "dt", "out"))}
_CONVOLUTIONS = ("shortconv.conv.weight", "ssm_conv1d.weight")
# llama.cpp recognises the 27B models of Gemma 2 and 3, which scale attention differently, by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

# Numbers of each config in the order in which they are written: transformers' names and their types, by GGUF's keys
# after the architecture's name.
SETTINGS = {
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "block_count": ("num_hidden_layers", int),
    "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int),
    "attention.value_length": ("head_dim", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "vocab_size": ("vocab_size", int),
}
# What a family has, if a config says so, that llama.cpp's does not.
LACKS = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "conv_bias"), "with biases"),
    "use_sliding_window": "with sliding windows",
    "enable_moe_block": "with experts",
}


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        parts: transformers' names of a block's tensors.
        rotates_pairs: whether llama.cpp rotates neighbouring elements of queries and keys, where transformers rotates
            halves; their rows are then reordered.
        norm_offset: what files add to the weights of norms, but not to those of linear attention.
        settings: numbers that other families do not have, as in `SETTINGS`, and what they are in files without
            them.
        read: returns what else the family adds to the common config.
        check: refuses configs that llama.cpp lacks, may write further settings, and returns what files have instead of
            a config's values; None if the family is only read.
    """

    arch: MODEL_ARCH
    parts: tuple[str, ...] = _NORMS + _LINEARS
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    settings: Mapping[str, tuple[str, type, float]] = field(default_factory=dict)
    read: Callable[[GgufFile, dict], dict[str, Any]] = lambda file, common: {}
    check: Callable[[GGUFWriter, Any], dict | None] | None = lambda writer, config: None

    @cached_property
    def _names(self) -> dict[str, str]:
        """GGUF's names by transformers', and transformers' by GGUF's, of the first block's tensors and the others."""
        names = {f"{own}.weight": f"{own}.weight" for own in _WHOLE}
        for part in self.parts:
            for suffix in ("",) if part in _BARE else (".weight", ".bias"):
                names[f"model.layers.0.{part}{suffix}"] = f"model.layers.0.{_BARE.get(part, part)}{suffix}"
        known = get_tensor_name_map(self.arch, 1)
        pairs = [(own, known.get_name(name, (".weight", ".bias"))) for own, name in names.items()]
        return {one: other for own, name in pairs if name for one, other in ((own, name), (name, own))}

    def other_name(self, name: str) -> str | None:
        """Returns GGUF's name of a tensor of transformers, or the other way round; None if the family has it not."""
        block = re.search(r"\.\d+\.", name)
        if block is None:
            return self._names.get(name)
        found = self._names.get(name.replace(block[0], ".0.", 1))
        return found and found.replace(".0.", block[0], 1)

    def convert(self, name: str, tensor: Tensor, config: Mapping[str, Any], *, back: bool) -> Tensor:
        """Converts a tensor of transformers, whose name is GGUF's, to GGUF's, or back."""
        if name.endswith(_CONVOLUTIONS):
            tensor = tensor.unsqueeze(1) if back else tensor.squeeze(1)
        if self.norm_offset and name.endswith("norm.weight") and "ssm_" not in name:
            return tensor.float() + (-self.norm_offset if back else self.norm_offset)
        if name.endswith("ssm_a"):
            tensor = (-tensor.float()).log() if back else -tensor.float().exp()
        part = name.split(".")[-2 if name.count(".") > 2 else -1]
        keys, values = (config.get(f"linear_num_{kind}_heads", 1) for kind in ("key", "value"))
        if keys != values and part in _OF_VALUES:
            # GGUF has the heads of values that share a key far from each other, and transformers beside each other.
            order, dim = (keys, values // keys), int(part == "ssm_out")
            order = order[::-1] if back else order
            first = 2 * keys * config["linear_key_head_dim"] if part in ("attn_qkv", "ssm_conv1d") else 0
            kept, moved = tensor.split([first, tensor.shape[dim] - first], dim)
            moved = moved.unflatten(dim, (*order, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
            return torch.cat([kept, moved], dim)
        if not self.rotates_pairs or part not in ("attn_q", "attn_k"):
            return tensor
        count = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return tensor.unflatten(0, (count, -1, 2) if back else (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def head_size(config) -> int:
    """Returns the size of the last layer's heads; in Gemma 4 that of full attention."""
    last = config.per_layer_config[config.num_hidden_layers - 1]
    return getattr(last, "head_dim", None) or config.hidden_size // config.num_attention_heads


def refusal(config, what: str) -> ExportError:
    return ExportError(f"llama.cpp cannot compute this {config.model_type} model {what}; use --format merged, or peft.")


# ------------------------------------------------------------------------------------------------------------ families


def _read_llama(file: GgufFile, common: dict) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _check_smollm3(writer: GGUFWriter, config) -> None:
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise refusal(config, "with other layers without rotary embeddings than every fourth one")


def _read_phi3(file: GgufFile, common: dict) -> dict[str, Any]:
    window = file.get("phi3.attention.sliding_window", int, 0)
    original = common["rope_parameters"].get("original_max_position_embeddings", common["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _read_gemma(file: GgufFile, common: dict) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _read_gemma2(file: GgufFile, common: dict) -> dict[str, Any]:
    scale = common["head_dim"]
    if common["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        scale = common["hidden_size"] / common["num_attention_heads"]
    return _read_gemma(file, common) | {"query_pre_attn_scalar": scale}


def _ropes(file: GgufFile, common: dict) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": file.positive(float, "rope.freq_base_swa", 10_000.0)}
    return {"full_attention": common["rope_parameters"], "sliding_attention": local}


def _add_local_rope(writer: GGUFWriter, config) -> None:
    local = config.rope_parameters["sliding_attention"]
    if local.get("rope_type", "default") != "default":
        raise refusal(config, "with scaled rotary embeddings in sliding windows")
    writer.add_rope_freq_base_swa(float(local["rope_theta"]))


def _read_gemma3(file: GgufFile, common: dict) -> dict[str, Any]:
    return _read_gemma2(file, common) | {
        "sliding_window_pattern": file.positive(int, "attention.sliding_window_pattern", 6),
        "rope_parameters": _ropes(file, common),
    }


def _check_gemma3(writer: GGUFWriter, config) -> None:
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        raise refusal(config, "with softcaps")
    _add_local_rope(writer, config)
    _check_windows(writer, config, every=6)


def _check_windows(writer: GGUFWriter, config, every: int) -> None:
    """Refuses other sliding windows than those of all layers but every second or sixth one."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    if windows != [(layer + 1) % every != 0 for layer in range(len(windows))]:
        raise refusal(config, f"with other layers of full attention than every {every}th one")
    if config.query_pre_attn_scalar != head_size(config):
        raise refusal(config, f"with attention scores scaled by {config.query_pre_attn_scalar}")


def _read_gemma4(file: GgufFile, common: dict) -> dict[str, Any]:
    layers, shared = common["num_hidden_layers"], file.get("gemma4.attention.shared_kv_layers", int, 0)
    windows = file.by_layer("attention.sliding_window_pattern", layers, bool)
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    if len(kinds) != layers or not _ends_as_gemma4(kinds, shared):
        raise ModelError(f"{file.name!r} has sliding windows in other layers than Gemma 4; download it again.")
    size = file.positive(int, "attention.key_length_swa")
    if file.positive(int, "rope.dimension_count_swa", size) != size:
        raise ModelError(f"{file.name!r} rotates a part of a head's features in sliding windows; expected all.")
    heads = dict(zip(kinds, cycle(file.by_layer("attention.head_count_kv", layers)), strict=False))
    sizes = file.by_layer("feed_forward_length", layers)
    embedding = file.tensors.get("per_layer_token_embd.weight")
    return _read_gemma(file, common) | {
        "layer_types": kinds,
        "head_dim": size,
        "global_head_dim": common["head_dim"],
        "num_key_value_heads": heads["sliding_attention"],
        "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": f"blk.{kinds.index('full_attention')}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "hidden_size_per_layer_input": file.get("gemma4.embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else common["vocab_size"],
        # llama.cpp has the softcap of all published models if a file has none.
        "final_logit_softcapping": file.get("gemma4.final_logit_softcapping", float, 30.0) or None,
        "rope_parameters": _ropes(file, common),
    }


def _check_gemma4(writer: GGUFWriter, config) -> dict[str, Any]:
    kinds, shared, layers = config.layer_types, config.num_kv_shared_layers, [*config.per_layer_config]
    heads = {(kind, each.head_dim, each.num_key_value_heads) for kind, each in zip(kinds, layers, strict=True)}
    inputs, other_tokens = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input != config.vocab_size
    refused = {
        "with other kinds of last layers": not _ends_as_gemma4(kinds, shared),
        "with heads that differ within a kind of layer": len(heads) != 2,
        "with attention to later tokens": config.use_bidirectional_attention == "all",
        "with other tokens for the inputs of layers": inputs and other_tokens,
    }
    for what, holds in refused.items():
        if holds:
            raise refusal(config, what)
    _add_local_rope(writer, config)
    size = layers[kinds.index("sliding_attention")].head_dim
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(shared)
    writer.add_key_length_swa(size)
    writer.add_value_length_swa(size)
    writer.add_rope_dimension_count_swa(size)
    writer.add_embedding_length_per_layer_input(inputs)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    double = [config.use_double_wide_mlp and mode == "reuse" for mode in config.kv_sharing_modes]
    return {
        "intermediate_size": [config.intermediate_size * (1 + each) for each in double],
        "num_key_value_heads": [each.num_key_value_heads for each in layers],
    }


def _ends_as_gemma4(kinds: list[str], shared: int) -> bool:
    """Whether the last two layers with keys of their own, which llama.cpp shares with later ones, are of both kinds."""
    own = kinds[: len(kinds) - shared]
    return kinds[-1] == "full_attention" and own[-2:] == ["sliding_attention", "full_attention"]


def _read_lfm2(file: GgufFile, common: dict) -> dict[str, Any]:
    shared = file.by_layer("attention.head_count_kv", common["num_hidden_layers"])
    if len(shared) != common["num_hidden_layers"]:
        raise ModelError(f"{file.name!r} does not say which of its layers attend; download it again.")
    kinds = ["full_attention" if number else "conv" for number in shared]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _check_lfm2(writer: GGUFWriter, config) -> dict[str, Any]:
    size, multiple = config.intermediate_size, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if config.block_ffn_dim_multiplier is not None:
            size = multiple * -(-int(config.block_ffn_dim_multiplier * size) // multiple)
    shared = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {"intermediate_size": size, "num_key_value_heads": shared}


def _read_qwen35(file: GgufFile, common: dict) -> dict[str, Any]:
    if file.get("qwen35.nextn_predict_layers", int, 0):
        raise ModelError(f"{file.name!r} predicts several tokens, which cannot be read; choose a file without MTP.")
    values, size = common["linear_num_value_heads"], file.positive(int, "ssm.inner_size")
    sections = [each for each in file.get("qwen35.rope.dimension_sections", list, []) if type(each) is int][:3]
    return {
        "linear_value_head_dim": size // values,
        "rope_parameters": common["rope_parameters"] | ({"mrope_section": sections} if len(sections) == 3 else {}),
        "full_attention_interval": file.positive(int, "full_attention_interval", 4),
    }


def _check_qwen35(writer: GGUFWriter, config) -> None:
    full = [number for number, kind in enumerate(config.layer_types, start=1) if kind == "full_attention"]
    if not full or full != [*range(full[0], len(config.layer_types) + 1, full[0])]:
        raise refusal(config, "without full attention at equal distances")
    if not math.isclose(config.rms_norm_eps, 1e-6, rel_tol=1e-6):
        # llama.cpp normalises keys with it too, and transformers with 1e-6.
        raise refusal(config, f"with the epsilon {config.rms_norm_eps} of its norms")
    sections = config.rope_parameters.get("mrope_section", (11, 11, 10))
    if not 0 < sum(sections) <= head_size(config):
        # llama.cpp aborts, though the sections do not matter for texts.
        raise refusal(config, f"with sections of {sum(sections)} features in heads of {head_size(config)}")
    writer.add_full_attention_interval(full[0])
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_sections([*sections, 0])


# By transformers' model types. Gemma 1 is only read: what llama.cpp computes with it was never compared.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, rotates_pairs=True, read=_read_llama),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_pairs=True),
    "qwen2": Family(MODEL_ARCH.QWEN2),
    "qwen3": Family(MODEL_ARCH.QWEN3, _NORMS + _LINEARS + _HEAD_NORMS),
    "qwen3_5_text": Family(
        MODEL_ARCH.QWEN35,
        _NORMS + _LINEARS + _HEAD_NORMS + _DELTA,
        norm_offset=1.0,
        settings={
            "ssm.conv_kernel": ("linear_conv_kernel_dim", int),
            "ssm.state_size": ("linear_key_head_dim", int),
            "ssm.group_count": ("linear_num_key_heads", int),
            "ssm.time_step_rank": ("linear_num_value_heads", int),
        },
        read=_read_qwen35,
        check=_check_qwen35,
    ),
    "lfm2": Family(
        MODEL_ARCH.LFM2,
        _LFM2,
        settings={
            "attention.layer_norm_rms_epsilon": ("norm_eps", float),
            "shortconv.l_cache": ("conv_L_cache", int),
        },
        read=_read_lfm2,
        check=_check_lfm2,
    ),
    "smollm3": Family(MODEL_ARCH.SMOLLM3, rotates_pairs=True, check=_check_smollm3),
    "phi3": Family(MODEL_ARCH.PHI3, _NORMS + _FUSED, read=_read_phi3),
    "gemma": Family(MODEL_ARCH.GEMMA, norm_offset=1.0, read=_read_gemma, check=None),
    "gemma2": Family(
        MODEL_ARCH.GEMMA2,
        _FOUR_NORMS + _LINEARS,
        norm_offset=1.0,
        settings={
            "attn_logit_softcapping": ("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", float, 30.0),
            "attention.sliding_window": ("sliding_window", int, 4096),
        },
        read=_read_gemma2,
        check=partial(_check_windows, every=2),
    ),
    "gemma3_text": Family(
        MODEL_ARCH.GEMMA3,
        _FOUR_NORMS + _LINEARS + _HEAD_NORMS,
        norm_offset=1.0,
        settings={"attention.sliding_window": ("sliding_window", int, 1024)},
        read=_read_gemma3,
        check=_check_gemma3,
    ),
    "gemma4_text": Family(
        MODEL_ARCH.GEMMA4,
        _FOUR_NORMS + _LINEARS + _HEAD_NORMS + _PER_LAYER,
        settings={"attention.sliding_window": ("sliding_window", int)},
        read=_read_gemma4,
        check=_check_gemma4,
    ),
}
# By GGUF's names. "llama" includes Mistral, whose files have no other name.
MODEL_TYPES = {MODEL_ARCH_NAMES[family.arch]: name for name, family in FAMILIES.items() if name != "mistral"}
