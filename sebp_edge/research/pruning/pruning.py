"""Prunes linear layers during a training: which stage each step has, and the weights at that stage.

A layer's parameter holds the pruned weight, which the model computes with, always in the same memory, so captured
graphs need not be captured again. The optimizer updates the dense weight, of the same dtype, with its gradient.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.models.training_hook import TrainingHook
from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.recipe import PruningRecipe
from sebp_edge.research.pruning.layers import layers_to_prune
from sebp_edge.research.pruning.phases import DENSE, Phases, Stage


class Pruning(TrainingHook):
    """The pruning of one model; its layers are dense until `begin`.

    Attributes:
        dense: the dense weight of each pruned parameter.
        stage: how the parameters are pruned now.
        num_done: the number of steps done since `begin`.
    """

    def __init__(self, model: nn.Module, sparsity: PruningRecipe):
        layers = layers_to_prune(model, sparsity).values()
        # A weight that several layers share is pruned once.
        self.dense = {layer.weight: layer.weight.detach().clone() for layer in layers}
        self._sparsity, self._phases, self.num_done, self.stage = sparsity, None, 0, DENSE

    @property
    def is_settled(self) -> bool:
        """Whether the sparse phase has begun."""
        return self._phases is not None and self.num_done >= self._phases.first_sparse_step

    def updated(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Returns the dense weights of pruned parameters, and the other parameters themselves."""
        return [self.dense.get(parameter, parameter) for parameter in parameters]

    def begin(self, num_steps: int, num_done: int = 0) -> None:
        """Begins a training of `num_steps` steps with the model's current weights, or goes on with the dense ones."""
        self._phases, self.num_done = Phases(self._sparsity, num_steps), num_done
        for parameter, dense in self.dense.items() if not num_done else ():
            dense.copy_(parameter.detach())
        self._prune(self._phases.stage(num_done))

    def step(self, learning_rates: Mapping[nn.Parameter, float | Tensor]) -> None:
        """Prunes the updated dense weights for the next step."""
        shrinkage = self._phases.shrinkage
        if shrinkage and not self.stage.is_dense:
            for seed, (parameter, dense) in enumerate(self.dense.items()):
                share = float(learning_rates.get(parameter, 0.0)) * shrinkage
                shrink_pruned_(dense, parameter.detach(), share, seed=seed, step=self.num_done)
        self.num_done += 1
        self._prune(self._phases.stage(self.num_done))

    def after_step(self, learning_rate: float) -> None:
        """Prunes the updated dense weights for the next step; all had the same learning rate."""
        self.step(dict.fromkeys(self.dense, learning_rate))

    def finish(self) -> None:
        """Prunes the weights to the pattern, whatever phase the training is in."""
        self._prune(self._phases.final)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Context in which the model has the weights that it would have if the training ended now."""
        self.finish()
        try:
            yield
        finally:
            self._prune(self._phases.stage(self.num_done))

    @torch.no_grad()
    def _prune(self, stage: Stage) -> None:
        """Writes the dense weights, pruned as `stage` says, into the parameters."""
        for parameter, dense in self.dense.items():
            if stage.is_dense:
                parameter.copy_(dense)
            else:
                prune_(parameter.detach(), dense, stage.n, stage.m, stage.decay)
        self.stage = stage
