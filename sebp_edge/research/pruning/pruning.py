"""Prunes linear layers during a training: which they are, which stage each step has, and the weights at that stage.

A layer's parameter holds the pruned weight, which the model computes with, always in the same memory, so captured
graphs need not be captured again. The optimizer updates the dense weight, of the same dtype, with its gradient.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.lora import adapted_layers, inner_model
from sebp_edge.errors import OptionError, SparsityError, suggest
from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.research.pruning.pruning_phases import Phases, Stage


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


class Pruning:
    """The pruning of one model in a training, which begins with its current weights.

    Attributes:
        dense: the dense weight of each pruned parameter.
        stage: how the parameters are pruned now.
        num_done: the number of steps done.
    """

    def __init__(self, model: nn.Module, phases: Phases, names: Sequence[str] | None):
        layers = layers_to_prune(model, phases.largest_group, names).values()
        self._phases, self.num_done = phases, 0
        # A weight that several layers share is pruned once.
        self.dense = {layer.weight: layer.weight.detach().clone() for layer in layers}
        self._prune(self._phases.stage(0))

    def step(self, learning_rates: Mapping[nn.Parameter, float | Tensor]) -> None:
        """Prunes the updated dense weights for the next step."""
        shrinkage = self._phases.shrinkage
        if shrinkage and not self.stage.is_dense:
            for seed, (parameter, dense) in enumerate(self.dense.items()):
                share = float(learning_rates.get(parameter, 0.0)) * shrinkage
                shrink_pruned_(dense, parameter.detach(), share, seed=seed, step=self.num_done)
        self.num_done += 1
        self._prune(self._phases.stage(self.num_done))

    def finish(self) -> None:
        """Prunes the weights to the pattern, whatever phase the training is in."""
        self._prune(self._phases.final)

    @torch.no_grad()
    def _prune(self, stage: Stage) -> None:
        """Writes the dense weights, pruned as `stage` says, into the parameters."""
        for parameter, dense in self.dense.items():
            if stage.is_dense:
                parameter.copy_(dense)
            else:
                prune_(parameter.detach(), dense, stage.n, stage.m, stage.decay)
        self.stage = stage
