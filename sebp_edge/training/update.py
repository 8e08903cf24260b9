"""One optimizer update: gradients are clipped to a global norm, AdamW follows them, and they are zero again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.memory.options import FASTEST, MAX_GRADIENTS_AT_ONCE, MemoryOptions
from sebp_edge.ops import AdamW, Moments, adamw_
from sebp_edge.recipe import Recipe
from sebp_edge.training.graphs import Graphs

# Where each parameter begins in a flat tensor: at a multiple of so many elements, for wide loads.
ALIGNMENT = 64


class Update:
    """AdamW (Loshchilov and Hutter 2019) of parameters whose `grad` it owns.

    While it lives, small parameters of one dtype, as adapters are, lie side by side in one tensor, and their gradients
    in another: clipping, AdamW and zeroing are a kernel each, not one for a few dozen tensors.

    Args:
        options: whether gradients come in pieces, and moments take 8 bits each.

    Attributes:
        adds_up: whether a step may have several micro-batches.
    """

    adds_up = True

    def __init__(self, parameters: list[Tensor], recipe: Recipe, options: MemoryOptions = FASTEST):
        self._own, self._max_norm = parameters, recipe.max_grad_norm
        is_small = not are_large(parameters)
        self._is_flat = is_small and len({parameter.dtype for parameter in parameters}) == 1
        self._in_pieces = options.in_pieces or not is_small
        self._parameters = [_flattened(parameters)] if self._is_flat else parameters
        for parameter in parameters if not self._is_flat else []:
            parameter.grad = torch.zeros_like(parameter)
        device = parameters[0].device
        self._adamw, self._norm = AdamW.on(device, weight_decay=recipe.weight_decay), torch.zeros((), device=device)
        in_8_bits = options.moments_in_8_bits or None
        self._moments = [Moments.of(parameter, in_8_bits=in_8_bits) for parameter in self._parameters]
        self._replay: Callable[[], None] | None = None
        self._learning_rate = 0.0

    def begin(self, learning_rate: float) -> None:
        """Begins a step, whose micro-batches are to follow."""
        self._learning_rate = learning_rate

    def take_gradients(self, loss: Tensor, *, rehearsing: bool = False) -> None:
        """Adds the gradients of `loss` to the parameters' `grad`."""
        add_gradients(loss, self._own, in_pieces=self._in_pieces)

    def finish(self) -> Tensor:
        """Updates the parameters; gives the gradients' norm before clipping, on the device."""
        # Here and not in `begin`, so that the micro-batches are under way while the host is at it.
        self._adamw.begin_step(self._learning_rate)
        (self._replay or self._step)()
        return self._norm.clone()

    def capture(self, graphs: Graphs) -> None:
        """Replays a graph from now on; parameters, gradients and moments stay what they are, bit for bit.

        Raises:
            CannotCapture: it goes on as it was.
        """
        # Gradients and learning rate are zero: the run before the capture moves nothing.
        graphs.rehearse(self._step)
        self._replay = graphs.capture("update", self._step)
        self.reset()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within it micro-batches are tried out before the first step. All memory of an update is taken, and nothing
        has changed in the end, bit for bit."""
        yield
        self.begin(0.0)
        self.zero_gradients()
        self.finish()
        self.reset()

    def reset(self) -> None:
        """Forgets moments and gradients."""
        self._adamw.reset()
        for moments in self._moments:
            moments.zero_()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Forgets what was added up since the last update."""
        torch._foreach_zero_([parameter.grad for parameter in self._parameters])

    def release(self) -> None:
        """Gives the memory of gradients and moments back, and each parameter a place of its own; ends the updates."""
        self._replay = None
        self._moments.clear()
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in self._own:
            parameter.grad = None
            if self._is_flat:
                parameter.data = parameter.data.clone()

    def _step(self) -> None:
        self._norm.copy_(torch.nn.utils.get_total_norm([parameter.grad for parameter in self._parameters]))
        # As torch's clip_grad_norm_ has it.
        factor = (self._max_norm / (self._norm + 1e-6)).clamp_(max=1.0)
        for seed, (parameter, moments) in enumerate(zip(self._parameters, self._moments, strict=True)):
            adamw_(parameter, parameter.grad, moments, self._adamw, seed=seed, factor=factor)
        self.zero_gradients()


def are_large(parameters: list[Tensor]) -> bool:
    """Whether so many gradients are better not all held at once."""
    return sum(parameter.nbytes for parameter in parameters) > MAX_GRADIENTS_AT_ONCE


def add_gradients(loss: Tensor, parameters: list[Tensor], *, in_pieces: bool) -> None:
    """Adds the gradients of `loss` to what the parameters have in `grad`, in place: one by one, or all at once."""
    if in_pieces:
        loss.backward()
    else:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]
        torch._foreach_add_([parameter.grad for parameter, _ in found], [gradient for _, gradient in found])


def _flattened(parameters: list[Tensor]) -> nn.Parameter:
    """One tensor that these parameters, and with its gradient their gradients, become parts of."""
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    flat = nn.Parameter(parameters[0].new_zeros(sum(sizes)))
    flat.grad = torch.zeros_like(flat)
    for parameter, data, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        place = data[: parameter.numel()].view_as(parameter)
        place.copy_(parameter.data)
        parameter.data, parameter.grad = place, grad[: parameter.numel()].view_as(parameter)
    return flat
