"""Captured graphs (level 3) for your own training loop and optimizer: gradients of hoisted batches by graph replay.

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

from sebp_edge.errors import MachineError
from sebp_edge.events import Sink
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.buckets import Bucket
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.training.graphs import GRADIENTS, Graphs, MicroBatchGraphs
from sebp_edge.training.update import add_gradients, are_large

FIRST_GRADIENTS = "first gradients"


class CapturedGradients:
    """Adds gradients to the `grad` of a hoisted model's trained parameters, on an NVIDIA GPU.

    The first batch of a bucket is run and captured, which takes seconds; later ones are replayed. During a capture, no
    loss computed elsewhere may still hold its autograd graph. The parameters must stay the same tensors, and the model
    must stay hoisted. The learning rate may change. So may the model's mode: training and evaluation have separate
    graphs, as have a step's first batch, which writes gradients, and its later ones, which add to them.

    Args:
        hoisted: computes in bf16 or fp16, by its weights or under autocast around this object's calls; in other dtypes
            attention synchronises with the GPU.
        on_event: receives a `GraphCaptured` for each capture.

    Raises:
        MachineError: the model is not on an NVIDIA GPU.
    """

    def __init__(self, hoisted: Hoisted | HoistedEncoder, on_event: Sink = lambda event: None):
        parameters = [parameter for parameter in hoisted.model.parameters() if parameter.requires_grad]
        device = next(hoisted.model.parameters()).device
        _refuse_without_gpu(device)
        self._sums, self._loss = _Sums(parameters), torch.zeros((), device=device)
        updates = {FIRST_GRADIENTS: _Written(self._sums), GRADIENTS: _Added(self._sums)}
        self._graphs = MicroBatchGraphs(Graphs(device, on_event), hoisted, updates, self._loss)

    def prepare(self, batches: Iterable[ActiveTokens]) -> None:
        """Chooses a few buckets that hold all batches to come; without this, each size gets a graph of its own.

        Each bucket is run twice before the first capture, as a step's first batch and as a later one: running it beside
        a captured graph would take more memory.
        """
        self._graphs.prepare(Bucket.holding(*tokens.sizes) for tokens in batches)

    def add(self, tokens: ActiveTokens, loss_rows: int | None = None) -> Tensor:
        """Adds the gradients of a batch's mean loss; returns that loss, an fp32 scalar on the device, without waiting.

        Args:
            tokens: on the host, with at least one loss row.
            loss_rows: divides the sum of losses; by default the batch's number of loss rows. If several batches make
                one step, give the number of all their loss rows.

        Raises:
            CannotCapture: the model does something that a graph cannot capture; nothing was changed.
        """
        is_first = self._sums.into_grad()
        self._loss.zero_()
        try:
            self._graphs.accumulate(
                tokens, loss_rows or len(tokens.targets), FIRST_GRADIENTS if is_first else GRADIENTS
            )
        except BaseException:
            if is_first:
                self._sums.out_of_grad()
            raise
        return self._loss.clone()

    def losses(self, tokens: ActiveTokens) -> Tensor:
        """Returns the loss of every loss row, without gradients: fp32 [C], on the host."""
        return self._graphs.losses(tokens)


def _refuse_without_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise MachineError(
            f"The model is on {device.type}, and graphs need an NVIDIA GPU; call hoisted.row_losses(tokens) there."
        )


class _Sums:
    """The fixed tensors that graphs write gradients to, also after an optimizer's `zero_grad()` has dropped `grad`."""

    def __init__(self, parameters: list[Tensor]):
        self.parameters, self.own = parameters, [torch.zeros_like(parameter) for parameter in parameters]

    def into_grad(self) -> bool:
        """Makes these tensors the parameters' `grad` and copies existing gradients into them.

        Returns whether no parameter had a gradient, as after `zero_grad()`.
        """
        pairs = list(zip(self.parameters, self.own, strict=True))
        forgotten = [own for parameter, own in pairs if parameter.grad is None]
        is_first = len(forgotten) == len(pairs)
        if forgotten and not is_first:
            torch._foreach_zero_(forgotten)
        for parameter, own in pairs:
            if parameter.grad is not None and parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
        return is_first

    def out_of_grad(self) -> None:
        """Undoes `into_grad` if no parameter had a gradient."""
        for parameter in self.parameters:
            parameter.grad = None


class _Added:
    """Adds a micro-batch's gradients to the existing ones."""

    def __init__(self, sums: _Sums):
        self._sums = sums

    def take_gradients(self, loss: Tensor, *, rehearsing: bool) -> None:
        add_gradients(loss, self._sums.parameters, in_pieces=are_large(self._sums.parameters))


class _Written(_Added):
    """Overwrites the existing gradients with a micro-batch's, or with zeros if a parameter gets none.

    Large gradients are written one by one during the backward pass: all at once they would take memory twice.
    """

    def take_gradients(self, loss: Tensor, *, rehearsing: bool) -> None:
        if rehearsing:
            # The existing gradients may belong to a step; a rehearsal adds zeros to them.
            super().take_gradients(loss, rehearsing=True)
            return
        parameters, own = self._sums.parameters, self._sums.own
        if are_large(parameters):
            written = self._written_as_they_come(loss)
        else:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            written = {number for number, gradient in enumerate(gradients) if gradient is not None}
            torch._foreach_copy_([own[number] for number in written], [gradients[number] for number in written])
        if others := [place for number, place in enumerate(own) if number not in written]:
            torch._foreach_zero_(others)

    def _written_as_they_come(self, loss: Tensor) -> set[int]:
        parameters, own, written = self._sums.parameters, self._sums.own, set()

        def write(number: int, parameter: Tensor) -> None:
            own[number].copy_(parameter.grad)
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
            for parameter, place in zip(parameters, own, strict=True):
                parameter.grad = place
        return written
