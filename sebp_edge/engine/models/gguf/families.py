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

_WHOLE = ("model.embed_tokens", "model.norm", "lm_head")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LINEARS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
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
        norm_offset: what files add to the weights of norms.
        settings: numbers that other families do not have, as in `_SETTINGS`, and what they are in files without them.
        read: returns what else the family adds to the common config.
        check: refuses configs that llama.cpp lacks, and may write further settings; None if the family is only read.
    """

    arch: MODEL_ARCH
    parts: tuple[str, ...] = _NORMS + _LINEARS
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    settings: Mapping[str, tuple[str, type, float]] = field(default_factory=dict)
    read: Callable[[GgufFile, dict], dict[str, Any]] = lambda file, common: {}
    check: Callable[[GGUFWriter, Any], None] | None = lambda writer, config: None

    @cached_property
    def names(self) -> dict[str, str]:
        """transformers' name of each tensor by GGUF's, both of the first block, without "weight"."""
        names = get_tensor_name_map(self.arch, 1)
        return {names.get_name(name): name for name in (*_WHOLE, *(f"model.layers.0.{part}" for part in self.parts))}

    def convert(self, name: str, tensor: Tensor, heads: Mapping[str, int], *, back: bool) -> Tensor:
        """Converts a tensor of transformers to GGUF's, or back.

        Args:
            name: GGUF's name.
            heads: the numbers of heads of queries and keys, by GGUF's names.
        """
        if self.norm_offset and name.endswith("norm.weight"):
            return tensor.float() + (-self.norm_offset if back else self.norm_offset)
        count = heads.get(name.rsplit(".", 2)[-2]) if self.rotates_pairs else None
        if count is None:
            return tensor
        return tensor.unflatten(0, (count, -1, 2) if back else (count, 2, -1)).transpose(1, 2).flatten(0, 2)


# ------------------------------------------------------------------------------------------------------------- reading


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a file's model.

    Raises:
        ModelError: it is no model of a known family, or asks for something that is not known here.
    """
    family = _family_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.name!r} has no embedding; expected a file with a whole model.")
    if file.get(f"{file.architecture}.expert_count", int, 0):
        raise ModelError(f"{file.name!r} is a mixture of experts, which cannot be read; choose a dense model.")
    hidden, heads = file.positive(int, "embedding_length"), file.positive(int, "attention.head_count")
    known = {"head_dim": file.positive(int, "attention.key_length", hidden // heads), "vocab_size": embedding.shape[0]}
    known["num_key_value_heads"] = file.positive(int, "attention.head_count_kv", heads)
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


def weight_names(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of each weight of its model, by transformers' name.

    Raises:
        ModelError: the file has tensors that its family does not have.
    """
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
    heads = file.positive(int, "attention.head_count")
    heads = {"attn_q": heads, "attn_k": file.positive(int, "attention.head_count_kv", heads)}
    return _family_of(file).convert(name, weight, heads, back=True).to(dtype)


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    match name.split("."):
        case [part, "weight"] if part in names:
            return f"{names[part]}.weight"
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
    """A model's tensors and settings under their names in GGUF.

    Raises:
        ExportError: llama.cpp does not compute this model as transformers does.
    """

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
        # Checks the settings before anything is written.
        self.add_settings(GGUFWriter(None, self.arch))

    def name(self, name: str) -> str:
        """Returns a tensor's name in GGUF."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ExportError(f"GGUF has no name for the weight {name!r} of this {self.config.model_type} model.")
        return found

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of transformers to GGUF's."""
        return self._family.convert(self.name(name), tensor, self._heads, back=False)

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of GGUF back to transformers'."""
        return self._family.convert(self.name(name), tensor, self._heads, back=True)

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
        for key, (name, kind) in _SETTINGS.items():
            _add(writer, key, kind(derived.get(name) or getattr(config, name)))
        expected = "gelu_pytorch_tanh" if family.norm_offset else "silu"
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation != expected:
            raise _refusal(config, f"with the activation {activation}")
        if not add_rope(writer, config, derived["head_dim"]):
            raise _refusal(config, f"with its rotary embeddings ({rope_of(config)['rope_type']})")
        family.check(writer, config)
        for key, (name, kind, _) in family.settings.items():
            _add(writer, key, kind(getattr(config, name)))


def _add(writer: GGUFWriter, key: str, value: float) -> None:
    (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{writer.arch}.{key}", value)


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


# By transformers' model types. Gemma 1 is only read: what llama.cpp computes with it was never compared.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, rotates_pairs=True, read=_read_llama, check=_check_llama),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_pairs=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, check=_check_qwen),
    "qwen3": Family(MODEL_ARCH.QWEN3, _NORMS + _LINEARS + _HEAD_NORMS, check=_check_qwen),
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
