"""Rotary embeddings in GGUF files: their settings, and the factors of their frequencies, read and written.

Files of Llama 3.1 to 3.3 and of Phi-3's long contexts contain the resulting factors as tensors.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor

from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.errors import ModelError

# Tensors that become part of the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3.1 to 3.3 share these; their files contain only the resulting factors.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The largest known heads have 512 features.
_MAX_HEAD_SIZE = 4096


def read_rope(file: GgufFile, head_size: int, context: int) -> dict[str, Any]:
    """Returns transformers' parameters of a file's rotary embeddings.

    Args:
        context: the longest text that the model reads.
    """
    rope = {"rope_type": "default", "rope_theta": file.positive(float, "rope.freq_base", 10_000.0)}
    size = file.positive(int, "rope.dimension_count", head_size)
    if size > _MAX_HEAD_SIZE:
        raise ModelError(f"{file.name!r} has heads of {size} features; expected at most {_MAX_HEAD_SIZE}.")
    if size != head_size:
        if file.architecture not in ("phi3", "qwen35"):
            raise ModelError(f"{file.name!r} rotates {size} of {head_size} features of a head; expected all.")
        rope["partial_rotary_factor"] = size / head_size
    for name in ROPE_TENSORS:
        if name in file.tensors and file.tensors[name].shape != (size // 2,):
            raise ModelError(
                f"{file.name!r} has {file.tensors[name].num_weights} factors of positions, not {size // 2}."
            )
    scaling = file.get(f"{file.architecture}.rope.scaling.type", str, "none")
    if "rope_factors_long.weight" in file.tensors and file.architecture == "phi3":
        return rope | _read_longrope(file, context)
    is_gemma4 = file.architecture == "gemma4"
    if scaling == "linear" and not is_gemma4:
        return rope | {"rope_type": "linear", "factor": file.positive(float, "rope.scaling.factor")}
    if scaling != "none":
        raise ModelError(
            f"{file.name!r} scales positions by {scaling[:20]!r}; expected none{' or linear' * (not is_gemma4)}."
        )
    if "rope_freqs.weight" in file.tensors:
        return _read_factors(file, size, rope)
    if is_gemma4:
        raise ModelError(f"{file.name!r} lacks 'rope_freqs.weight'; download it again, or another file of the model.")
    return rope


def _read_factors(file: GgufFile, size: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's scaling, or of Gemma 4's share, if they give the factors in the file."""
    found = file.read("rope_freqs.weight")
    if file.architecture == "gemma4":
        rope |= {"rope_type": "proportional", "partial_rotary_factor": float((found == 1).float().mean())}
    else:
        rope |= {"rope_type": "llama3", "factor": round(float(found.max()), 4), **_LLAMA3_ROPE}
    if not torch.allclose(found, _factors(rope, size), rtol=1e-4):
        raise ModelError(
            f"{file.name!r} scales positions in a way that is not known; expected that of Llama 3.1, or Gemma 4's own."
        )
    return rope


def _read_longrope(file: GgufFile, context: int) -> dict[str, Any]:
    original = file.positive(int, "rope.scaling.original_context_length")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original}
    rope |= {f"{length}_factor": file.read(f"rope_factors_{length}.weight").tolist() for length in ("long", "short")}
    factor, usual = file.positive(float, "rope.scaling.attn_factor", 1.0), _longrope_attention_factor(context, original)
    # Only where it is not what transformers computes by itself, since transformers 4 refuses to be told.
    return rope if math.isclose(factor, usual, rel_tol=1e-6) else rope | {"attention_factor": factor}


def rope_of(config) -> Mapping:
    """Returns a config's rotary embeddings; those of full attention if they differ by the kind of attention."""
    rope = config.rope_parameters
    return {"rope_type": "default"} | rope.get("full_attention", rope)


def add_rope(writer: GGUFWriter, config, head_size: int) -> bool:
    """Writes the settings of rotary embeddings; returns False if llama.cpp lacks their kind."""
    rope = rope_of(config)
    kind, share = rope["rope_type"], rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    if kind == "proportional":
        share = 1.0  # which llama.cpp has as factors
    writer.add_rope_dimension_count(int(head_size * (share or 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        usual = _longrope_attention_factor(config.max_position_embeddings, original)
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or usual)
    if writer.arch == "gemma4":
        return kind == "proportional" and rope.get("factor", 1.0) == 1.0
    return kind in ("default", "linear", "llama3", "longrope")


def rope_tensors(config, head_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a config's rotary embeddings, by their names in files."""
    rope = rope_of(config)
    if rope["rope_type"] in ("llama3", "proportional"):
        yield "rope_freqs.weight", _factors(rope, head_size)
    elif rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)


def _factors(rope: Mapping, size: int) -> Tensor:
    """Returns by what Llama 3.1 divides each rotary frequency, as transformers computes it; Gemma 4 rotates a share."""
    if rope["rope_type"] == "proportional":
        rotated = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        return torch.tensor([1.0] * rotated + [1e30] * (size // 2 - rotated))
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


def _longrope_attention_factor(context: int, original: int) -> float:
    """Returns by what LongRoPE scales attention, as transformers computes it."""
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0
