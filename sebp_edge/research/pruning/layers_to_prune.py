"""Finds the linear layers of a model that can be pruned."""

from collections.abc import Sequence

from torch import nn

from sebp_edge.engine.models.lora import adapted_layers, inner_model
from sebp_edge.errors import OptionError, SparsityError, suggest


def layers_to_prune(model: nn.Module, m: int, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Returns the linear layers to prune in groups of at most `m`, by name; see `nm_sparse`."""
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names or ()):
        raise OptionError("The layers to prune must be a list of the ends of their names.")
    layers = _find_layers(model, names)
    for name, layer in layers.items():
        if layer.in_features % m:
            raise SparsityError(
                f"The layer {name!r} has {layer.in_features} inputs, which groups of {m} do not divide; choose another "
                "pattern or method, or leave this layer out."
            )
    return layers


def _find_layers(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    if adapted_layers(model):
        raise SparsityError(
            "An adapter's product with its input is dense, so a pruned model with a LoRA adapter would not be N:M any "
            "more; train all weights instead."
        )
    inner = inner_model(model)
    # The decoder or encoder of a transformers model; of any other model, all of it.
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    body = set(getattr(inner, "base_model", inner).modules()) - {head}
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer in body}
    if names is not None:
        known = sorted({name.rpartition(".")[2] for name in found})
        for wanted in names:
            if not any(_is_named(name, wanted) for name in found):
                raise SparsityError(f"The model has no linear layers named {wanted!r}; {suggest(wanted, known)}")
        found = {name: layer for name, layer in found.items() if any(_is_named(name, wanted) for wanted in names)}
    if not found:
        raise SparsityError("The model has no linear layers to prune.")
    for name, layer in found.items():
        if type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point():
            raise SparsityError(
                f"The weight of {name!r} is sharded or in 4 bits, and cannot be pruned; load the model in 16 or 32 "
                "bits on one device, or use DistributedDataParallel."
            )
    return found


def _is_named(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)
