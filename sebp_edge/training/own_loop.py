"""Level 3 in a loop of one's own, with an optimizer of one's own: gradients of hoisted batches by replays of graphs.

    with HoistedEncoder(model) as hoisted:
        gradients = CapturedGradients(hoisted)
        for batch in loader:
            loss = gradients.add(hoisted.tokens(batch))     # as hoisted.losses(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

Decoders likewise, from `ActiveTokens.gather`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from sebp_edge.errors import MachineError
from sebp_edge.events import Sink
from sebp_edge.sparse.active_tokens import ActiveTokens
from sebp_edge.sparse.buckets import Bucket
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.training.graph import Graphs, MicroBatchGraphs
from sebp_edge.training.update import add_gradients, are_large


class CapturedGradients:
    """Adds gradients to the `grad` of a hoisted model's trained parameters, on an NVIDIA GPU.

    A bucket's first batch is run and captured, which takes seconds; later ones are replays. At that moment no loss that
    was computed elsewhere may be held with its autograd graph. Parameters must stay the tensors that they are, and the
    model hoisted. A learning rate may change, and the model's mode: each has its graphs.

    Args:
        hoisted: in bf16 or fp16, by its weights or by autocast around this object's calls: elsewhere attention waits
            for the GPU.
        on_event: is given a `GraphCaptured` for each capture.

    Raises:
        MachineError: the model is not on an NVIDIA GPU.
    """

    def __init__(self, hoisted: Hoisted | HoistedEncoder, on_event: Sink = lambda event: None):
        parameters = [parameter for parameter in hoisted.model.parameters() if parameter.requires_grad]
        device = next(hoisted.model.parameters()).device
        if device.type != "cuda":
            raise MachineError(
                f"The model is on {device.type}, and graphs need an NVIDIA GPU; call hoisted.row_losses(tokens) there."
            )
        self._sums = _Sums(parameters)
        self._loss = torch.zeros((), device=device)
        self._graphs = MicroBatchGraphs(Graphs(device, on_event), hoisted, self._sums, self._loss)

    def prepare(self, batches: Iterable[ActiveTokens]) -> None:
        """Is told the batches to come, so that a few graphs hold them all; without it each size has its own."""
        self._graphs.prepare(Bucket.holding(*tokens.sizes) for tokens in batches)

    def add(self, tokens: ActiveTokens, loss_rows: int | None = None) -> Tensor:
        """Adds the gradients of a batch's mean loss, and gives that loss; fp32 scalar on the device, not waited for.

        Args:
            tokens: on the host, with a loss row.
            loss_rows: what the sum of losses is divided by, where several batches make one step.

        Raises:
            CannotCapture: the model does what no graph can hold; nothing was changed.
        """
        self._sums.into_grad()
        self._loss.zero_()
        self._graphs.accumulate(tokens, loss_rows or len(tokens.targets))
        return self._loss.clone()

    def losses(self, tokens: ActiveTokens) -> Tensor:
        """The loss of every loss row, without gradients; fp32 [C], on the host."""
        return self._graphs.losses(tokens)


class _Sums:
    """The tensors that graphs add gradients to, whatever an optimizer's `zero_grad()` leaves in `grad`."""

    def __init__(self, parameters: list[Tensor]):
        self._parameters, self._own = parameters, [torch.zeros_like(parameter) for parameter in parameters]

    def take_gradients(self, loss: Tensor, *, rehearsing: bool) -> None:
        add_gradients(loss, self._parameters, in_pieces=are_large(self._parameters))

    def into_grad(self) -> None:
        """Makes them the parameters' gradients, with what is there: nothing, after `zero_grad()`."""
        pairs = list(zip(self._parameters, self._own, strict=True))
        forgotten = [own for parameter, own in pairs if parameter.grad is None]
        if forgotten:
            torch._foreach_zero_(forgotten)
        for parameter, own in pairs:
            if parameter.grad is not None and parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
