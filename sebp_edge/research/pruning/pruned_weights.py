"""The pruned weights that a model computes with, and the dense weights that its optimizer updates.

A layer's parameter holds the pruned weight, always in the same memory, so captured graphs need not be captured again.
The dense weight, of the same dtype, is kept here. Gradients are those of the pruned weight.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.research.pruning.phases import DENSE, Stage


class PrunedWeights:
    """The weights of some linear layers, at first dense.

    Attributes:
        stage: how the parameters are pruned.
    """

    def __init__(self, layers: dict[str, nn.Linear]):
        # A weight that several layers share is pruned once.
        self._dense = {layer.weight: layer.weight.detach().clone() for layer in layers.values()}
        self.stage = DENSE

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._dense)

    def dense(self, parameter: nn.Parameter) -> Tensor:
        """Returns what the optimizer updates for a parameter: its dense weight; itself if it is not pruned."""
        return self._dense.get(parameter, parameter)

    def take_dense(self) -> None:
        """Takes the parameters' values as the dense weights."""
        for parameter, dense in self._dense.items():
            dense.copy_(parameter.detach())
        self.stage = DENSE

    @torch.no_grad()
    def prune(self, stage: Stage) -> None:
        """Writes the dense weights, pruned as `stage` says, into the parameters."""
        for parameter, dense in self._dense.items():
            if stage.is_dense:
                parameter.copy_(dense)
            else:
                prune_(parameter.detach(), dense, stage.n, stage.m, stage.decay)
        self.stage = stage

    def shrink(self, shares: Mapping[nn.Parameter, float], step: int) -> None:
        """Shrinks the dense weights whose parameters have been pruned to 0, each by the share for its parameter."""
        if self.stage.is_dense:
            return
        for seed, (parameter, dense) in enumerate(self._dense.items()):
            shrink_pruned_(dense, parameter.detach(), shares.get(parameter, 0.0), seed=seed, step=step)
