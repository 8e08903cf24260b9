"""What GGUF calls a model family's tensors and settings, to read files and to write them.

Configs are read as dicts in transformers' words. Nothing is guessed: a family, a scaling of positions or a tensor that
is not known here is refused. A family is written if llama.cpp computes it exactly as transformers does; a setting that
llama.cpp lacks is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from torch import Tensor

from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf.rotary import ROPE_TENSORS, add_rope, read_rope, rope_of, rope_tensors
from sebp_edge.errors import ExportError, ModelError

_WHOLE = ("model.embed_tokens", "model.norm", "model.embedding_norm", "lm_head")
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
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_proj", "norm", "out_proj")
)
# Linear attention's tensors with rows, or columns, for each head of values.
_OF_VALUES = {"attn_qkv", "attn_gate", *(f"ssm_{name}" for name in ("conv1d", "alpha", "beta", "a", "dt", "out"))}
_CONVOLUTIONS = ("shortconv.conv.weight", "ssm_conv1d.weight")
# llama.cpp recognises the 27B models of Gemma 2 and 3, which scale attention differently, by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

# Numbers of each config in the order in which they are written: transformers' names and their types, by GGUF's keys
# after the architecture's name.
_SETTINGS = {
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


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        parts: transformers' names of a block's tensors.
        rotates_pairs: whether llama.cpp rotates neighbouring elements of queries and keys, where transformers rotates
            halves; their rows are then reordered.
        norm_offset: what files add to the weights of norms, but not to those of linear attention.
        settings: numbers that other families do not have, as in `_SETTINGS`, and what they are in files without them.
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
    def names(self) -> dict[str, str]:
        """transformers' name of each tensor by GGUF's, both of the first block, without "weight"."""
        names = get_tensor_name_map(self.arch, 1)
        found = {names.get_name(name): name for name in (*_WHOLE, *(f"model.layers.0.{part}" for part in self.parts))}
        return {name: own for name, own in found.items() if name is not None}

    def convert(self, name: str, tensor: Tensor, heads: Mapping[str, int], *, back: bool) -> Tensor:
        """Converts a tensor of transformers to GGUF's, or back.

        Args:
            name: GGUF's name.
            heads: the numbers of heads of queries and keys, by GGUF's names; of linear attention, those of "keys" and
                "values", and the number of "rows" of queries and keys.
        """
        if name.endswith(_CONVOLUTIONS):
            tensor = tensor.unsqueeze(1) if back else tensor.squeeze(1)
        if self.norm_offset and name.endswith("norm.weight") and "ssm_" not in name:
            return tensor.float() + (-self.norm_offset if back else self.norm_offset)
        if name.endswith("ssm_a"):
            tensor = (-tensor.float()).log() if back else -tensor.float().exp()
        part = name.split(".")[-2 if name.count(".") > 2 else -1]
        if heads["keys"] != heads["values"] and part in _OF_VALUES:
            # GGUF has the heads of values that share a key far from each other, and transformers beside each other.
            order, dim = (heads["keys"], heads["values"] // heads["keys"]), int(part == "ssm_out")
            order = order[::-1] if back else order
            first = heads["rows"] if part in ("attn_qkv", "ssm_conv1d") else 0
            kept, moved = tensor.split([first, tensor.shape[dim] - first], dim)
            moved = moved.unflatten(dim, (*order, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
            return torch.cat([kept, moved], dim)
        count = heads.get(part) if self.rotates_pairs else None
        if count is None:
            return tensor
        return tensor.unflatten(0, (count, -1, 2) if back else (count, 2, -1)).transpose(1, 2).flatten(0, 2)


# ------------------------------------------------------------------------------------------------------------- reading


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a file's model."""
    family = _family_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.name!r} has no embedding; expected a file with a whole model.")
    if file.get(f"{file.architecture}.expert_count", int, 0):
        raise ModelError(f"{file.name!r} is a mixture of experts, which cannot be read; choose a dense model.")
    hidden, heads = file.positive(int, "embedding_length"), file.positive(int, "attention.head_count")
    known = {"head_dim": file.positive(int, "attention.key_length", hidden // heads), "vocab_size": embedding.shape[0]}
    known["num_key_value_heads"] = _key_value_heads(file, heads)
    common = known | {
        name: file.positive(kind, key, *default)
        for key, (name, kind, *default) in (_SETTINGS | family.settings).items()
        if name not in known
    }
    common |= {
        "model_type": _MODEL_TYPES[file.architecture],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": read_rope(file, common["head_dim"], common["max_position_embeddings"]),
        **_token_ids(file),
    }
    return common | family.read(file, common)


def _key_value_heads(file: GgufFile, heads: int) -> int:
    """Returns the number of heads of keys; LFM2 has a number for each layer, 0 where it does not attend."""
    key = f"{file.architecture}.attention.head_count_kv"
    if file.architecture != "lfm2":
        return file.positive(int, "attention.head_count_kv", heads)
    numbers = {number for number in file.get(key, list, []) if number != 0}
    if len(numbers) != 1 or type(*numbers) is not int:
        raise ModelError(f"{file.name!r} has {key} {str(numbers)[:40]}; expected one number, and 0 in some layers.")
    return numbers.pop()


def weight_names(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of each weight of its model, by transformers' name."""
    family, found = _family_of(file), {}
    for name in file.tensors:
        if name in ROPE_TENSORS:
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
    """Returns a weight as transformers' model has it."""
    # Norms in fp32, since an offset is subtracted before they are rounded.
    weight = file.read(name, torch.float32 if len(file.tensors[name].shape) == 1 else dtype)
    return _family_of(file).convert(name, weight, _heads_of(file), back=True).to(dtype)


def shape_of_weight(file: GgufFile, name: str) -> torch.Size:
    """Returns the shape of a weight that `read_weight` returns."""
    weight = torch.empty(file.tensors[name].shape, device="meta")
    return _family_of(file).convert(name, weight, _heads_of(file), back=True).shape


def _heads_of(file: GgufFile) -> dict[str, int]:
    heads = file.positive(int, "attention.head_count")
    found = {"keys": 1, "values": 1, "rows": 0, "attn_q": heads, "attn_k": _key_value_heads(file, heads)}
    if file.architecture == "qwen35":
        keys, values = file.positive(int, "ssm.group_count"), file.positive(int, "ssm.time_step_rank")
        found |= {"keys": keys, "values": values, "rows": 2 * keys * file.positive(int, "ssm.state_size")}
    return found


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    match name.split("."):
        case [part, "weight"] if part in names:
            return f"{names[part]}.weight"
        case ["blk", number, "ssm_a"] if number.isdecimal() and "blk.0.ssm_a" in names:
            return names["blk.0.ssm_a"].replace(".0.", f".{number}.")
        case ["blk", number, "ssm_dt", "bias"] if number.isdecimal() and "blk.0.ssm_dt" in names:
            return names["blk.0.ssm_dt"].replace(".0.", f".{number}.").replace("dt_proj", "dt_bias")
        case ["blk", number, "shortconv", part, "weight"] if f"blk.0.shortconv.{part}" in names and number.isdecimal():
            return f"{names[f'blk.0.shortconv.{part}'].replace('.0.', f'.{number}.')}.weight"
        case ["blk", number, part, "weight" | "bias" as kind] if number.isdecimal() and f"blk.0.{part}" in names:
            return f"{names[f'blk.0.{part}'].replace('.0.', f'.{number}.')}.{kind}"
    return None


def _family_of(file: GgufFile) -> Family:
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ModelError(f"{file.name!r} contains a GGUF {kind[:20]}, not a model; give the base model's file.")
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{file.name!r} is a part of a split model; join the parts with llama-gguf-split --merge.")
    if file.architecture not in _MODEL_TYPES:
        raise ModelError(
            f"{file.name!r} is a model of the family {file.architecture[:40]!r}; expected {', '.join(_MODEL_TYPES)}."
        )
    return FAMILIES[_MODEL_TYPES[file.architecture]]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "padding")}
    # A turn of a chat may end with a token of its own.
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }


# ------------------------------------------------------------------------------------------------------------- writing


class GgufModel:
    """A model's tensors and settings under their names in GGUF."""

    def __init__(self, config):
        written = [model_type for model_type, family in FAMILIES.items() if family.check is not None]
        if config.model_type not in written:
            raise ExportError(
                f"{config.model_type} models cannot be written as GGUF; these can: {', '.join(written)}. Use --format "
                "merged, or peft."
            )
        self.config, self._family = config, FAMILIES[config.model_type]
        self.arch = MODEL_ARCH_NAMES[self._family.arch]
        self._names = get_tensor_name_map(self._family.arch, config.num_hidden_layers)
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        keys, values = (getattr(config, f"linear_num_{kind}_heads", 1) for kind in ("key", "value"))
        rows = 2 * keys * getattr(config, "linear_key_head_dim", 0)
        self._heads |= {"keys": keys, "values": values, "rows": rows}
        # Checks the settings before anything is written.
        self.add_settings(GGUFWriter(None, self.arch))

    def name(self, name: str) -> str:
        """Returns a tensor's name in GGUF."""
        found = self._names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ExportError(f"GGUF has no name for the weight {name!r} of this {self.config.model_type} model.")
        return found

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of transformers to GGUF's."""
        return self._family.convert(self.name(name), tensor, self._heads, back=False)

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of GGUF back to transformers'."""
        return self._family.convert(self.name(name), tensor, self._heads, back=True)

    def refuse_adapter(self) -> None:
        """Raises an ExportError if an adapter alone cannot be written: GGUF orders a layer's inputs otherwise."""
        if self._heads["keys"] != self._heads["values"]:
            raise ExportError(
                f"An adapter of this {self.config.model_type} model cannot be written as GGUF by itself; use --format "
                "gguf, which merges it, or peft."
            )

    def extra_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors that GGUF has besides the model's own: the factors of rotary frequencies."""
        return rope_tensors(self.config, _head_size(self.config))

    @property
    def context_length(self) -> int:
        """The longest text that llama.cpp computes as transformers does: it has no windows in some families."""
        config, lacks_windows = self.config, self._family.arch in (MODEL_ARCH.LLAMA, MODEL_ARCH.PHI3)
        window = (getattr(config, "sliding_window", None) if lacks_windows else None) or config.max_position_embeddings
        return min(window, config.max_position_embeddings)

    def add_settings(self, writer: GGUFWriter) -> None:
        """Writes the model's settings."""
        config, family = self.config, self._family
        derived = {"max_position_embeddings": self.context_length, "head_dim": _head_size(config)}
        expected = "gelu_pytorch_tanh" if self.arch.startswith("gemma") else "silu"
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", expected)
        if activation != expected:
            raise _refusal(config, f"with the activation {activation}")
        if not add_rope(writer, config, derived["head_dim"]):
            raise _refusal(config, f"with its rotary embeddings ({rope_of(config)['rope_type']})")
        derived |= family.check(writer, config) or {}
        for key, (name, kind, *_) in (_SETTINGS | family.settings).items():
            _add(writer, key, derived.get(name) or kind(getattr(config, name)))


def _add(writer: GGUFWriter, key: str, value: float | list[int]) -> None:
    kinds = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    kinds[type(value)](f"{writer.arch}.{key}", value)


def _head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refusal(config, what: str) -> ExportError:
    return ExportError(f"llama.cpp cannot compute this {config.model_type} model {what}; use --format merged, or peft.")


# ------------------------------------------------------------------------------------------------------------ families


def _read_llama(file: GgufFile, common: dict) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _check_llama(writer: GGUFWriter, config) -> None:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise _refusal(config, "with biases")


def _check_qwen(writer: GGUFWriter, config) -> None:
    if getattr(config, "use_sliding_window", False):
        raise _refusal(config, "with sliding windows")


def _check_smollm3(writer: GGUFWriter, config) -> None:
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise _refusal(config, "with other layers without rotary embeddings than every fourth one")
    _check_qwen(writer, config)
    _check_llama(writer, config)


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


def _read_gemma3(file: GgufFile, common: dict) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": file.positive(float, "rope.freq_base_swa", 10_000.0)}
    return _read_gemma2(file, common) | {
        "sliding_window_pattern": file.positive(int, "attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
    }


def _check_gemma3(writer: GGUFWriter, config) -> None:
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        raise _refusal(config, "with softcaps")
    local = config.rope_parameters["sliding_attention"]
    if local.get("rope_type", "default") != "default":
        raise _refusal(config, "with scaled rotary embeddings in sliding windows")
    writer.add_rope_freq_base_swa(float(local["rope_theta"]))
    _check_windows(writer, config, every=6)


def _check_windows(writer: GGUFWriter, config, every: int) -> None:
    """Refuses other sliding windows than those of all layers but every second or sixth one."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    if windows != [(layer + 1) % every != 0 for layer in range(len(windows))]:
        raise _refusal(config, f"with other layers of full attention than every {every}th one")
    if config.query_pre_attn_scalar != _head_size(config):
        raise _refusal(config, f"with attention scores scaled by {config.query_pre_attn_scalar}")


def _read_lfm2(file: GgufFile, common: dict) -> dict[str, Any]:
    shared = file.get("lfm2.attention.head_count_kv", list, [])
    if len(shared) != common["num_hidden_layers"]:
        raise ModelError(f"{file.name!r} does not say which of its layers attend; download it again.")
    kinds = ["full_attention" if number else "conv" for number in shared]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _check_lfm2(writer: GGUFWriter, config) -> dict[str, Any]:
    if config.conv_bias:
        raise _refusal(config, "with biases")
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
        raise _refusal(config, "without full attention at equal distances")
    if config.attention_bias:
        raise _refusal(config, "with biases")
    writer.add_full_attention_interval(full[0])
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_sections([*config.rope_parameters.get("mrope_section", (11, 11, 10)), 0])


# By transformers' model types. Gemma 1 is only read: what llama.cpp computes with it was never compared.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, rotates_pairs=True, read=_read_llama, check=_check_llama),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_pairs=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, check=_check_qwen),
    "qwen3": Family(MODEL_ARCH.QWEN3, _NORMS + _LINEARS + _HEAD_NORMS, check=_check_qwen),
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
}
# By GGUF's names. "llama" includes Mistral, whose files have no other name.
_MODEL_TYPES = {MODEL_ARCH_NAMES[family.arch]: name for name, family in FAMILIES.items() if name != "mistral"}
