"""Computes gradients of hoisted batches with captured graphs (level 3), for your own training loop and optimizer.

    with HoistedEncoder(model) as hoisted:
        gradients = CapturedGradients(hoisted)
        for batch in loader:
            loss = gradients.add(hoisted.tokens(batch))     # as hoisted.losses(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

Decoders work the same way; their batches come from `ActiveTokens.gather`.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.training.graphs import GRADIENTS, GraphPool, MicroBatchGraphs
from sebp_edge.engine.training.update import add_gradients, have_large_gradients
from sebp_edge.errors import MachineError
from sebp_edge.events import Sink, silent

FIRST_GRADIENTS = "first gradients"


class CapturedGradients:
    """Adds gradients to the `grad` of a hoisted model's trained parameters, on an NVIDIA GPU.

    The first batch of a bucket is run and captured, which takes seconds; later ones are replayed. During a capture, no
    loss computed elsewhere may still hold its autograd graph. The parameters must stay the same tensors, and the model
    must stay hoisted. Hooks run during captures only. The learning rate may change, and so may the model's mode. There
    are separate graphs for training and evaluation mode, and for the first batch of a step, which writes gradients, and
    later ones, which add to them.

    Args:
        hoisted: the model, which must compute in bf16 or fp16: by its weights, or under autocast around this object's
            calls. In other dtypes attention synchronises with the GPU.
        on_event: receives a `GraphCaptured` for each capture.

    Raises:
        MachineError: the model is not on an NVIDIA GPU.
    """

    def __init__(self, hoisted: Hoisted | HoistedEncoder, on_event: Sink = silent):
        parameters = [parameter for parameter in hoisted.model.parameters() if parameter.requires_grad]
        device = next(hoisted.model.parameters()).device
        _refuse_without_gpu(device)
        self._buffers, self._loss = _GradientBuffers(parameters), torch.zeros((), device=device)
        updates = {FIRST_GRADIENTS: _WriteGradients(self._buffers), GRADIENTS: _AddGradients(self._buffers)}
        self._graphs = MicroBatchGraphs(GraphPool(device, on_event), hoisted, updates, self._loss)

    def prepare(self, batches: Iterable[ActiveTokens]) -> None:
        """Chooses a few buckets that hold all later batches; without this, each size gets a graph of its own.

        Each bucket is run twice before the first capture, as the first batch of a step and as a later one: running it
        after a capture would need memory in addition to that graph's.
        """
        batches = list(batches)
        sizes = [(tokens.sizes.on_grid, tokens.prefixes is not None) for tokens in batches]
        self._graphs.prepare(sizes, nums_soft_targets={tokens.num_soft_targets for tokens in batches})

    def add(self, tokens: ActiveTokens, loss_rows: int | None = None) -> Tensor:
        """Adds the gradients of a batch's mean loss; returns that loss, an fp32 scalar on the device, without waiting.

        Args:
            tokens: the batch, on the host, with at least one loss row.
            loss_rows: the divisor of the sum of losses; by default the batch's number of loss rows. If several batches
                make one step, give the total of their loss rows.

        Raises:
            CannotCapture: the model does something that a graph cannot capture; nothing was changed.
            SparsityError: the model has changed since its graphs were captured; the gradients are not to be used.
        """
        is_first = self._buffers.assign_grad()
        self._loss.zero_()
        try:
            self._graphs.accumulate(
                tokens, loss_rows or len(tokens.targets), FIRST_GRADIENTS if is_first else GRADIENTS
            )
        except BaseException:
            if is_first:
                self._buffers.drop_grad()
            raise
        return self._loss.clone()

    def losses(self, tokens: ActiveTokens) -> Tensor:
        """Returns the loss of every loss row, without gradients: fp32 [C], on the host."""
        return self._graphs.losses(tokens)


def _refuse_without_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise MachineError(
            f"Graphs need an NVIDIA GPU, but the model is on {device.type}; call hoisted.row_losses(tokens) instead."
        )


class _GradientBuffers:
    """The fixed tensors that graphs write gradients to, which outlive an optimizer's `zero_grad()`."""

    def __init__(self, parameters: list[Tensor]):
        self.parameters, self.tensors = parameters, [torch.zeros_like(parameter) for parameter in parameters]

    def assign_grad(self) -> bool:
        """Makes these tensors the parameters' `grad` and copies existing gradients into them.

        Returns whether no parameter had a gradient, as after `zero_grad()`.
        """
        pairs = list(zip(self.parameters, self.tensors, strict=True))
        without_grad = [buffer for parameter, buffer in pairs if parameter.grad is None]
        is_first = len(without_grad) == len(pairs)
        if without_grad and not is_first:
            torch._foreach_zero_(without_grad)
        for parameter, buffer in pairs:
            if parameter.grad is not None and parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        return is_first

    def drop_grad(self) -> None:
        """Undoes `assign_grad` if no parameter had a gradient."""
        for parameter in self.parameters:
            parameter.grad = None


class _AddGradients:
    """Adds a micro-batch's gradients to the existing ones."""

    def __init__(self, buffers: _GradientBuffers):
        self._buffers = buffers

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool) -> None:
        add_gradients(loss, self._buffers.parameters, one_by_one=have_large_gradients(self._buffers.parameters))


class _WriteGradients(_AddGradients):
    """Overwrites the existing gradients with a micro-batch's, or with zeros if a parameter gets none.

    Large gradients are written one by one during the backward pass: all at once they would take memory twice.
    """

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool) -> None:
        if is_warming_up:
            # The existing gradients may belong to a step; a warm-up adds zeros to them.
            super().take_gradients(loss, is_warming_up=True)
            return
        parameters, buffers = self._buffers.parameters, self._buffers.tensors
        if have_large_gradients(parameters):
            written = self._write_one_by_one(loss)
        else:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            written = {number for number, gradient in enumerate(gradients) if gradient is not None}
            torch._foreach_copy_([buffers[number] for number in written], [gradients[number] for number in written])
        if others := [buffer for number, buffer in enumerate(buffers) if number not in written]:
            torch._foreach_zero_(others)

    def _write_one_by_one(self, loss: Tensor) -> set[int]:
        parameters, buffers, written = self._buffers.parameters, self._buffers.tensors, set()

        def write(number: int, parameter: Tensor) -> None:
            buffers[number].copy_(parameter.grad)
            parameter.grad = None
            written.add(number)

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(write, number))
            for number, parameter in enumerate(parameters)
        ]
        try:
            for parameter in parameters:
                parameter.grad = None
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, buffer in zip(parameters, buffers, strict=True):
                parameter.grad = buffer
        return written
