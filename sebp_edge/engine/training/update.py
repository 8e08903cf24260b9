"""Runs optimizer updates: clips gradients to a global norm, applies AdamW, and zeroes the gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.engine.memory.memory_options import FASTEST, MAX_GRADIENTS_AT_ONCE, MemoryOptions
from sebp_edge.engine.training.graphs import GraphPool
from sebp_edge.ops import AdamW, Moments, adamw_
from sebp_edge.recipe import Recipe

# Parameters start at multiples of this many elements in a flat tensor, to allow wide loads.
ALIGNMENT = 64


class AdamWState:
    """Parameters, and what AdamW (Loshchilov and Hutter 2019) needs to update them."""

    def __init__(self, parameters: list[Tensor], recipe: Recipe, *, in_8_bits: bool | None = None):
        self._parameters, self._max_norm = parameters, recipe.max_grad_norm
        self._adamw = AdamW.on(parameters[0].device, weight_decay=recipe.weight_decay)
        self._moments = [Moments.of(parameter, in_8_bits=in_8_bits) for parameter in parameters]

    @property
    def state(self) -> list[Tensor]:
        """What a training goes on from after a step: the weights, the moments and the count of the steps, in place."""
        moments = (values for each in self._moments for values in each if values is not None)
        return [*self._parameters, *moments, self._adamw.step]

    def reset(self) -> None:
        """Resets the optimizer: moments and the step count."""
        self._adamw.reset()
        for moments in self._moments:
            moments.zero_()

    def _factor(self, norm: Tensor) -> Tensor:
        """What clips gradients of this norm, as torch's clip_grad_norm_ does."""
        return (self._max_norm / (norm + 1e-6)).clamp_(max=1.0)


class Update(AdamWState):
    """AdamW for parameters whose `grad` it owns.

    Until `release`, small parameters of one dtype, such as adapters, are views of one flat tensor, and their gradients
    views of another: clipping, AdamW and zeroing then take a kernel each, not one for every few dozen tensors. Kernels
    may add to these gradients themselves (see `LoraGroup`).

    Args:
        options: whether gradients are added one by one, and whether moments take 8 bits each.

    Attributes:
        can_accumulate: whether a step may have several micro-batches.
    """

    can_accumulate = True

    def __init__(self, parameters: list[Tensor], recipe: Recipe, options: MemoryOptions = FASTEST):
        is_small = not have_large_gradients(parameters)
        self._is_flat = is_small and len({parameter.dtype for parameter in parameters}) == 1
        for parameter in parameters if not self._is_flat else []:
            parameter.grad = torch.zeros_like(parameter)
        updated = [_flattened(parameters)] if self._is_flat else parameters
        super().__init__(updated, recipe, in_8_bits=options.moments_in_8_bits or None)
        self._model_parameters, self._one_by_one = parameters, options.small_buffers or not is_small
        self._norm = torch.zeros((), device=parameters[0].device)
        self._replay: Callable[[], None] | None = None
        self._learning_rate = 0.0

    def begin(self, learning_rate: float) -> None:
        """Begins a step, before its micro-batches."""
        self._learning_rate = learning_rate

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool = False) -> None:
        """Adds the gradients of `loss` to the parameters' `grad`."""
        add_gradients(loss, self._model_parameters, one_by_one=self._one_by_one)

    def finish(self) -> Tensor:
        """Updates the parameters; returns the gradients' norm before clipping, an fp32 scalar on the device."""
        # Here, not in `begin`, the host works while the micro-batches run.
        self._adamw.begin_step(self._learning_rate)
        (self._replay or self._step)()
        return self._norm.clone()

    def capture(self, graphs: GraphPool) -> None:
        """Captures the update, which `finish` then replays; changes neither parameters, gradients nor moments.

        If it cannot be captured, which is a CannotCapture, `finish` runs it eagerly.
        """
        # The warm-up changes no parameter, since gradients and learning rate are zero.
        graphs.warm_up(self._step)
        self._replay = graphs.capture("update", self._step)
        self.reset()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Returns a context for the dry run of a micro-batch before the first step.

        On exit, runs an update, to use its memory too. Nothing changes, bit for bit.
        """
        yield
        self.begin(0.0)
        self.zero_gradients()
        self.finish()
        self.reset()

    def reset(self) -> None:
        """Resets the optimizer: moments, gradients and the step count."""
        super().reset()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Discards the gradients added since the last update."""
        torch._foreach_zero_([parameter.grad for parameter in self._parameters])

    def release(self) -> None:
        """Frees gradients and moments, and gives each parameter its own storage again; ends the updates."""
        self._replay = None
        self._moments.clear()
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in self._model_parameters:
            parameter.grad = None
            if self._is_flat:
                parameter.main_grad = None
                parameter.data = parameter.data.clone()

    def _step(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        if self._is_flat:
            torch.linalg.vector_norm(gradients[0], dtype=self._norm.dtype, out=self._norm)
        else:
            self._norm.copy_(torch.nn.utils.get_total_norm(gradients))
        factor = self._factor(self._norm)
        for seed, parameter in enumerate(self._parameters):
            adamw_(parameter, parameter.grad, self._moments[seed], self._adamw, seed=seed, factor=factor)
        self.zero_gradients()


def have_large_gradients(parameters: list[Tensor]) -> bool:
    """Whether the parameters' gradients are too large to be held all at once."""
    return sum(parameter.nbytes for parameter in parameters) > MAX_GRADIENTS_AT_ONCE


def add_gradients(loss: Tensor, parameters: list[Tensor], *, one_by_one: bool) -> None:
    """Adds the gradients of `loss` to the parameters' `grad` in place, one by one or all at once."""
    if one_by_one:
        loss.backward()
    else:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]
        if found:
            torch._foreach_add_([parameter.grad for parameter, _ in found], [gradient for _, gradient in found])


def _flattened(parameters: list[Tensor]) -> nn.Parameter:
    """Makes the parameters views of one flat tensor, and their gradients views of its gradient; returns that tensor."""
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    flat = nn.Parameter(parameters[0].new_zeros(sum(sizes)))
    flat.grad = torch.zeros_like(flat)
    for parameter, data, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        view = data[: parameter.numel()].view_as(parameter)
        view.copy_(parameter.data)
        parameter.data, parameter.grad = view, grad[: parameter.numel()].view_as(parameter)
        parameter.main_grad = parameter.grad
    return flat
