"""Finds the linear layers of a model that a pattern prunes."""

from collections.abc import Sequence

from torch import nn

from sebp_edge.errors import SparsityError, suggest
from sebp_edge.models.architecture import is_linear
from sebp_edge.models.lora import without_adapter
from sebp_edge.pruning.phases import largest_group
from sebp_edge.sparsity import Sparsity


def layers_to_prune(model: nn.Module, sparsity: Sparsity) -> dict[str, nn.Linear]:
    """Returns the linear layers to prune, by name.

    Raises:
        SparsityError: the model has no such layers, its weights are in 4 bits or sharded, it has an adapter, or the
            pattern does not divide a layer's inputs.
    """
    layers, m = _find_layers(model, sparsity.layers), largest_group(sparsity)
    for name, layer in layers.items():
        if layer.in_features % m:
            raise SparsityError(
                f"The layer {name!r} has {layer.in_features} inputs, which groups of {m} do not divide; choose another "
                "pattern or method, or leave this layer out."
            )
    return layers


def _find_layers(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    if without_adapter(model) is not model:
        raise SparsityError(
            "An adapter's product with its input is dense, so a pruned model with a LoRA adapter would not be N:M any "
            "more; train all weights instead."
        )
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    exact = {name: layer for name, layer in linear.items() if is_linear(layer)}
    other = next((type(layer).__name__ for layer in linear.values() if not is_linear(layer)), None)
    if other:
        raise SparsityError(f"The model has layers of {other}, whose weights cannot be pruned; load it in 16 bits.")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {name: layer for name, layer in exact.items() if type(layer) is nn.Linear and layer is not head}
    if names is not None:
        known = sorted({name.rpartition(".")[2] for name in found})
        for name in names:
            if name not in known:
                raise SparsityError(f"The model has no linear layers named {name!r}; {suggest(name, known)}")
        found = {name: layer for name, layer in found.items() if name.rpartition(".")[2] in names}
    if not found:
        raise SparsityError("The model has no linear layers to prune.")
    if any(type(layer.weight) is not nn.Parameter for layer in found.values()):
        raise SparsityError("The model's weights are sharded; prune it on one device, or with DistributedDataParallel.")
    return found
