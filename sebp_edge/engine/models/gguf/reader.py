"""A file's model: its config, and its weights as transformers has them."""

from typing import Any

import torch
from torch import Tensor

from sebp_edge.engine.models.gguf.families import FAMILIES, MODEL_TYPES, SETTINGS, Family
from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf.rotary import ROPE_TENSORS, read_rope
from sebp_edge.errors import ModelError


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a file's model."""
    family = _family_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.name!r} has no embedding; expected a file with a whole model.")
    if file.get(f"{file.architecture}.expert_count", int, 0):
        raise ModelError(f"{file.name!r} is a mixture of experts, which cannot be read; choose a dense model.")
    hidden, heads = file.positive(int, "embedding_length"), file.positive(int, "attention.head_count")
    layers = file.positive(int, "block_count")
    # Of numbers for each layer the largest; the shapes of weights show whether it fits.
    known = {
        "head_dim": file.positive(int, "attention.key_length", hidden // heads),
        "vocab_size": embedding.shape[0],
        "intermediate_size": max(file.by_layer("feed_forward_length", layers)),
        "num_key_value_heads": max(file.by_layer("attention.head_count_kv", layers, default=heads)),
    }
    common = known | {
        name: file.positive(kind, key, *default)
        for key, (name, kind, *default) in (SETTINGS | family.settings).items()
        if name not in known
    }
    common |= {
        "model_type": MODEL_TYPES[file.architecture],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": read_rope(file, common["head_dim"], common["max_position_embeddings"]),
        **_token_ids(file),
    }
    return common | family.read(file, common)


def weight_names(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of each weight of its model, by transformers' name."""
    family, found = _family_of(file), {}
    for name in file.tensors:
        if name in ROPE_TENSORS:
            continue
        own = family.other_name(name)
        if own is None:
            kind = "vision or audio layers" if name.startswith(("v.", "mm.", "a.")) else f"the tensor {name[:60]!r}"
            raise ModelError(
                f"{file.name!r} has {kind}, which the family {file.architecture!r} does not have here; choose a text "
                "model."
            )
        found[own] = name
    return found


def read_weight(file: GgufFile, name: str, dtype: torch.dtype) -> Tensor:
    """Returns a weight as transformers' model has it."""
    # Norms in fp32, since an offset is subtracted before they are rounded.
    weight = file.read(name, torch.float32 if len(file.tensors[name].shape) == 1 else dtype)
    return _family_of(file).convert(name, weight, config_of(file), back=True).to(dtype)


def shape_of_weight(file: GgufFile, name: str) -> torch.Size:
    """Returns the shape of a weight that `read_weight` returns; of one that cannot be converted, the file's."""
    weight = torch.empty(file.tensors[name].shape, device="meta")
    try:
        return _family_of(file).convert(name, weight, config_of(file), back=True).shape
    except (RuntimeError, IndexError):
        return weight.shape


def _family_of(file: GgufFile) -> Family:
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ModelError(f"{file.name!r} contains a GGUF {kind[:20]}, not a model; give the base model's file.")
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{file.name!r} is a part of a split model; join the parts with llama-gguf-split --merge.")
    if file.architecture not in MODEL_TYPES:
        raise ModelError(
            f"{file.name!r} is a model of the family {file.architecture[:40]!r}; expected {', '.join(MODEL_TYPES)}."
        )
    return FAMILIES[MODEL_TYPES[file.architecture]]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    ids = {name: file.token_id(name) for name in ("bos", "eos", "eot", "padding")}
    # A turn of a chat may end with a token of its own.
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
