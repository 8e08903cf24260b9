"""Prunes linear layers during a training: which stage each step has, and the weights at that stage.

A layer's parameter holds the pruned weight, which the model computes with, always in the same memory, so captured
graphs need not be captured again. The optimizer updates the dense weight, of the same dtype, with its gradient.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.research.pruning.layers import layers_to_prune
from sebp_edge.research.pruning.pruning_phases import Phases, Stage


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
