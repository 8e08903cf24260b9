"""Updates within the backward pass: a gradient is used as soon as it is complete, and then dropped.

So no more than a few gradients are in memory at once, and full fine-tuning takes little more than weights and moments.
Two things follow: a micro-batch is a step, since gradients are not added up; and each tensor's gradient is clipped on
its own, since the norm of all of them is not known yet. Weights may be in bf16: `adamw_` rounds them without bias.

A parameter's gradient is complete when all layers that read it have run their backward passes, so a tied embedding has
one gradient and one update, and no layer sees a weight that has changed: one that would raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from sebp_edge.ops import AdamW, Moments, adamw_
from sebp_edge.recipe import Recipe
from sebp_edge.training.graphs import Graphs


class UpdateInBackward:
    """AdamW of parameters that are updated in every backward pass; their `grad` is None before and after.

    Attributes:
        adds_up: whether a step may have several micro-batches.
    """

    adds_up = False

    def __init__(self, parameters: list[Tensor], recipe: Recipe):
        device = parameters[0].device
        self._max_norm = recipe.max_grad_norm
        self._adamw = AdamW.on(device, weight_decay=recipe.weight_decay)
        self._moments = [Moments.of(parameter) for parameter in parameters]
        self._square = torch.zeros((), device=device)
        self._rehearsing = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, number))
            for number, parameter in enumerate(parameters)
        ]

    def begin(self, learning_rate: float) -> None:
        """Begins a step, whose one micro-batch is to follow."""
        self._adamw.begin_step(learning_rate)
        self._square.zero_()

    def take_gradients(self, loss: Tensor, *, rehearsing: bool = False) -> None:
        """Runs the backward pass of `loss`, and all updates in it."""
        before, self._rehearsing = self._rehearsing, rehearsing
        try:
            loss.backward()
        finally:
            self._rehearsing = before

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within it micro-batches are tried out: gradients are dropped as they come, and nothing is changed."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def finish(self) -> Tensor:
        """The norm of all gradients before clipping, on the device."""
        return self._square.sqrt()

    def capture(self, graphs: Graphs) -> None:
        """Captures nothing: updates are part of the micro-batches' graphs."""

    def reset(self) -> None:
        """Forgets moments and steps."""
        self._adamw.reset()
        for moments in self._moments:
            moments.zero_()

    def release(self) -> None:
        """Gives the moments' memory back, and leaves the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._moments.clear()

    def _take(self, number: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        # As torch's clip_grad_norm_ has it.
        factor = (self._max_norm / (norm + 1e-6)).clamp_(max=1.0)
        moments = self._moments[number]
        if self._rehearsing:
            # What is launched first is compiled; a few elements do for that, and copies of them.
            parameter, gradient = _few(parameter), _few(gradient)
            moments = Moments.of(parameter)
        else:
            self._square.add_(norm.square())
        adamw_(parameter, gradient, moments, self._adamw, seed=number, factor=factor)


def _few(x: Tensor) -> Tensor:
    """A copy of some elements: few, but by 16 as divisible as all of them, since kernels are compiled for either."""
    return x.detach().flatten()[: 256 + x.numel() % 256].clone()
