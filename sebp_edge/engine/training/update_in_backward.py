"""Updates parameters within the backward pass: each gradient is used as soon as it is complete, then dropped.

Only a few gradients are in memory at once, so full fine-tuning takes little more memory than weights and moments. Two
consequences: a step has one micro-batch, since gradients are not accumulated; and each tensor's gradient is clipped by
its own norm, since the global norm is not known yet. Weights may be in bf16: `adamw_` rounds them without bias.

A parameter's gradient is complete when all layers that read the parameter have run their backward passes. So a tied
embedding has one gradient and one update, and no backward pass reads a changed weight; autograd raises if one does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from sebp_edge.engine.training.graphs import GraphPool
from sebp_edge.engine.training.update import AdamWState
from sebp_edge.ops import Moments, adamw_
from sebp_edge.recipe import Recipe


class UpdateInBackward(AdamWState):
    """Applies AdamW in every backward pass; the parameters' `grad` is None before and after."""

    can_accumulate = False

    def __init__(self, parameters: list[Tensor], recipe: Recipe):
        super().__init__(parameters, recipe)
        self._squared_norm = torch.zeros((), device=parameters[0].device)
        self._drops_gradients = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._update_parameter, number))
            for number, parameter in enumerate(parameters)
        ]

    def begin(self, learning_rate: float) -> None:
        """Begins a step, before its one micro-batch."""
        self._adamw.begin_step(learning_rate)
        self._squared_norm.zero_()

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool = False) -> None:
        """Runs the backward pass of `loss`, which updates the parameters unless `is_warming_up`."""
        before, self._drops_gradients = self._drops_gradients, is_warming_up
        try:
            loss.backward()
        finally:
            self._drops_gradients = before

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Returns a context for the dry run of a micro-batch: gradients are dropped as they come; nothing changes."""
        self._drops_gradients = True
        try:
            yield
        finally:
            self._drops_gradients = False

    def finish(self) -> Tensor:
        """Returns the norm of all gradients before clipping, an fp32 scalar on the device."""
        return self._squared_norm.sqrt()

    def capture(self, graphs: GraphPool) -> None:
        """Does nothing: updates are part of the micro-batches' graphs."""

    def release(self) -> None:
        """Frees the moments, and removes the hooks that update the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._moments.clear()

    def _update_parameter(self, number: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        factor, moments = self._factor(norm), self._moments[number]
        if self._drops_gradients:
            # The first launch compiles the kernel, for which a few elements are enough.
            parameter, gradient = _first_elements(parameter), _first_elements(gradient)
            moments = Moments.of(parameter)
        else:
            self._squared_norm.add_(norm.square())
        adamw_(parameter, gradient, moments, self._adamw, seed=number, factor=factor)


def _first_elements(x: Tensor) -> Tensor:
    """Copies a few elements; their number is as divisible by 16 as the whole, so that the same kernel is compiled."""
    return x.detach().flatten()[: 256 + x.numel() % 256].clone()
