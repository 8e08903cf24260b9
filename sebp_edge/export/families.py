"""What GGUF calls a model family's tensors and settings.

A family is here if llama.cpp computes it exactly as transformers does; a setting that llama.cpp lacks is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map
from torch import Tensor

from sebp_edge.errors import ExportError
from sebp_edge.models.architecture import head_size_of


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        arch: its architecture in GGUF.
        rotates_pairs: whether llama.cpp rotates neighbouring elements of queries and keys, where transformers rotates
            halves; their rows are then reordered.
        norm_offset: what is added to the weights of norms.
        add: adds settings that other families do not have, and refuses those that llama.cpp lacks.
    """

    arch: MODEL_ARCH
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    add: Callable[[GGUFWriter, object], None] = lambda writer, config: None


class GgufModel:
    """A model's tensors and settings under their names in GGUF.

    Args:
        config: the model's config.

    Raises:
        ExportError: llama.cpp does not compute this model as transformers does.
    """

    def __init__(self, config):
        if config.model_type not in FAMILIES:
            raise ExportError(
                f"{config.model_type} models cannot be written as GGUF; these can: {', '.join(FAMILIES)}. Use --format "
                "merged, or peft."
            )
        self.config, self._family = config, FAMILIES[config.model_type]
        self.arch = MODEL_ARCH_NAMES[self._family.arch]
        self._names = get_tensor_name_map(self._family.arch, config.num_hidden_layers)
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
        if self._family.norm_offset and name.endswith("norm.weight"):
            return tensor.float() + self._family.norm_offset
        heads = self._rotated_heads(name)
        return tensor if heads is None else _to_pairs(tensor, heads)

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of GGUF back to transformers'."""
        if self._family.norm_offset and name.endswith("norm.weight"):
            return tensor.float() - self._family.norm_offset
        heads = self._rotated_heads(name)
        return tensor if heads is None else _to_halves(tensor, heads)

    def _rotated_heads(self, name: str) -> int | None:
        """Returns the number of heads in a tensor whose rows are reordered; None for all others."""
        if not self._family.rotates_pairs:
            return None
        projection = name.rsplit(".", 2)[-2]
        return {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}.get(projection)

    def extra_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors that GGUF has besides the model's own: the factors of rotary frequencies."""
        rope = _rope(self.config)
        if rope["rope_type"] == "llama3":
            yield "rope_freqs.weight", _llama3_factors(rope, head_size_of(self.config))
        elif rope["rope_type"] == "longrope":
            for length in ("long", "short"):
                yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)

    @property
    def context_length(self) -> int:
        """The longest text that llama.cpp computes as transformers does: it has no windows in some families."""
        config, lacks_windows = self.config, self._family.arch in (MODEL_ARCH.LLAMA, MODEL_ARCH.PHI3)
        window = (getattr(config, "sliding_window", None) if lacks_windows else None) or config.max_position_embeddings
        return min(window, config.max_position_embeddings)

    def add_settings(self, writer: GGUFWriter) -> None:
        """Writes the model's settings."""
        config, size = self.config, head_size_of(self.config)
        writer.add_context_length(self.context_length)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        expected = ("gelu_pytorch_tanh",) if self._family.norm_offset else ("silu",)
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in expected:
            raise _refusal(config, f"with the activation {activation}")
        _add_rope(writer, config, size)
        self._family.add(writer, config)


def _refusal(config, what: str) -> ExportError:
    return ExportError(f"llama.cpp cannot compute this {config.model_type} model {what}; use --format merged, or peft.")


def _to_pairs(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _to_halves(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# --------------------------------------------------------------------------------------------------- rotary embeddings


def _rope(config) -> Mapping:
    """Returns the parameters of rotary embeddings; those of full attention if they differ by the kind of attention."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    return {"rope_type": "default"} | rope


def _add_rope(writer: GGUFWriter, config, size: int) -> None:
    rope = _rope(config)
    kind, share = rope["rope_type"], rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(size * (share or 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        own = rope.get("attention_factor")
        factor = own or (math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0)
        writer.add_rope_scaling_attn_factors(factor)
    elif kind not in ("default", "llama3"):
        raise _refusal(config, f"with its rotary embeddings ({kind})")


def _llama3_factors(rope: Mapping, size: int) -> Tensor:
    """Returns by what Llama 3.1 divides each rotary frequency, as transformers computes it."""
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    wavelengths, original = 2 * math.pi / frequencies, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(
        wavelengths > original / low,
        torch.full_like(wavelengths, factor),
        torch.where(wavelengths < original / high, torch.ones_like(wavelengths), between),
    )


# ------------------------------------------------------------------------------------------------------------ families


def _add_llama(writer: GGUFWriter, config) -> None:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise _refusal(config, "with biases")


def _add_qwen(writer: GGUFWriter, config) -> None:
    if getattr(config, "use_sliding_window", False):
        raise _refusal(config, "with sliding windows")


def _add_smollm3(writer: GGUFWriter, config) -> None:
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise _refusal(config, "with other layers without rotary embeddings than every fourth one")
    _add_qwen(writer, config)
    _add_llama(writer, config)


def _add_gemma2(writer: GGUFWriter, config) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_windows(writer, config, every=2)


def _add_gemma3(writer: GGUFWriter, config) -> None:
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        raise _refusal(config, "with softcaps")
    local = config.rope_parameters["sliding_attention"]
    if local.get("rope_type", "default") != "default":
        raise _refusal(config, "with scaled rotary embeddings in sliding windows")
    writer.add_rope_freq_base_swa(float(local["rope_theta"]))
    _add_windows(writer, config, every=6)


def _add_windows(writer: GGUFWriter, config, every: int) -> None:
    """Writes the sliding window of all layers but every second or sixth one."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    if windows != [(layer + 1) % every != 0 for layer in range(len(windows))]:
        raise _refusal(config, f"with other layers of full attention than every {every}th one")
    if config.query_pre_attn_scalar != head_size_of(config):
        raise _refusal(config, f"with attention scores scaled by {config.query_pre_attn_scalar}")
    writer.add_sliding_window(config.sliding_window)


# By transformers' model types.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, rotates_pairs=True, add=_add_llama),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_pairs=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, add=_add_qwen),
    "qwen3": Family(MODEL_ARCH.QWEN3, add=_add_qwen),
    "smollm3": Family(MODEL_ARCH.SMOLLM3, rotates_pairs=True, add=_add_smollm3),
    "gemma2": Family(MODEL_ARCH.GEMMA2, norm_offset=1.0, add=_add_gemma2),
    "gemma3_text": Family(MODEL_ARCH.GEMMA3, norm_offset=1.0, add=_add_gemma3),
    "phi3": Family(MODEL_ARCH.PHI3),
}
