"""Lets a long pass of a model be ended midway: calls a check at each linear layer, in the backward pass too."""

from collections.abc import Callable
from functools import partial
from typing import Self

from torch import Tensor, nn

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.models.architecture import is_linear
from sebp_edge.engine.models.lora import adapted_layers
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of


class Stops(Patch):
    """Handle of one model's checks, from `attach` on, or in a context.

    The check is called before a layer computes, and before its backward pass; it may raise, which ends the pass.
    """

    def __init__(self, model: nn.Module, check: Check):
        super().__init__()
        self._model, self._check = model, check

    def attach(self) -> None:
        """Checks from now on, around what other patches compute."""
        adapted = adapted_layers(self._model)
        inside = {part for layer in adapted for part in layer.modules()}
        layers = [layer for layer in self._model.modules() if is_linear(layer) and layer not in inside]
        for layer in (*adapted, *layers):
            self._replace(layer, partial(_run_checked, forward_of(layer), self._check))

    def __enter__(self) -> Self:
        self.attach()
        return self


def _run_checked(forward: Callable, check: Check, *args, **kwargs):
    def check_backward(_gradient: Tensor) -> None:
        check()

    check()
    output = forward(*args, **kwargs)
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(check_backward)
    return output
