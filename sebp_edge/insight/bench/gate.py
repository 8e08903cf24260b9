"""What is right, and how far from it a way may be: no way is timed that computes another loss or other gradients.

Right are the loss and the gradients of the dense model in fp32, one sequence at a time: those of the padded batch, to
which padding on the right adds exact zeros, in far less memory. In bf16 a way may err by twice as much as the dense
model itself does without padding.

Shapes: B sequences, T positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.insight.bench.timer import running
from sebp_edge.insight.bench.ways import Way, trained
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

# So many gradients of each parameter are compared, evenly spread.
SAMPLE = 4096
# Relative errors of a loss that are still called right. In bf16, dense transformers were found 6e-3 off, of a 3B shape
# with random weights.
LOSS_TOLERANCE, LOSS_TOLERANCE_FP32 = 2e-2, 1e-4


@dataclass(frozen=True)
class Deviation:
    """How far a way is from what is right: the loss's relative error, and the gradients' by their norm."""

    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class Reference:
    """What is right for a batch, and how far from it is still called right.

    Attributes:
        gradients: samples, one tensor for each trained parameter, fp32 on the CPU.
        allowed: the largest deviation.
    """

    loss: float
    gradients: list[Tensor]
    allowed: Deviation

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> "Reference":
        """Computes it, in the model's own memory.

        Args:
            model: a dense decoder on its device, with the parameters to train requiring gradients.
            batch: right-padded, on the model's device.
        """
        in_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
        rounded = [] if in_fp32 else _one_by_one(model, batch)[1]
        with _fp32(model):
            loss, gradients = _one_by_one(model, batch)
        rounding = 0.0 if in_fp32 else _distance(rounded, gradients)
        tolerance = LOSS_TOLERANCE_FP32 if in_fp32 else LOSS_TOLERANCE
        return cls(loss, gradients, Deviation(tolerance, 2 * rounding + 1e-4))

    def deviation(self, model: nn.Module, batch: Batch, way: Way) -> Deviation:
        """How far a way's loss and gradients are from these."""
        loss, gradients = loss_and_gradients(model, batch, way)
        return Deviation(abs(loss / self.loss - 1), _distance(gradients, self.gradients))

    def what_is_wrong(self, found: Deviation) -> str | None:
        """In words, what is too far off; None where nothing is, and NaN is."""
        if not found.loss_error <= self.allowed.loss_error:
            return f"its loss is off by {found.loss_error:.1e}, above {self.allowed.loss_error:.1e}"
        if not found.gradient_error <= self.allowed.gradient_error:
            return f"its gradients are off by {found.gradient_error:.1e}, above {self.allowed.gradient_error:.1e}"
        return None


def sampled(gradient: Tensor) -> Tensor:
    """At most about SAMPLE of a gradient's elements, fp32 on the CPU."""
    return gradient.flatten()[:: max(1, gradient.numel() // SAMPLE)].float().cpu()


def loss_and_gradients(
    model: nn.Module, batch: Batch, way: Way, take: Callable[[Tensor], Tensor] = sampled
) -> tuple[float, list[Tensor]]:
    """The mean loss of a batch, and what `take` makes of each trained parameter's gradient, in the model's order."""
    with running(model, batch, way) as step:
        # The drop-in's first pass finds its rows; what is timed, and so looked at here, are those after it.
        step.gradients()
        for parameter in trained(model):
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = float(step.gradients())
        return loss, [take(parameter.grad) for parameter in trained(model)]


def _one_by_one(model: nn.Module, batch: Batch) -> tuple[float, list[Tensor]]:
    """The batch's mean loss and its sampled gradients, from sequences without padding."""
    counts_B = (batch.labels[:, 1:] != IGNORE).sum(dim=1).tolist()
    lengths_B = batch.attention_mask.sum(dim=1).tolist()
    total = 0.0
    for ids_T, labels_T, length, count in zip(batch.input_ids, batch.labels, lengths_B, counts_B, strict=True):
        loss = model(input_ids=ids_T[None, :length], labels=labels_T[None, :length], use_cache=False).loss
        weighted = loss * (count / sum(counts_B))
        weighted.backward()
        total += float(weighted.detach())
    gradients = [sampled(parameter.grad) for parameter in trained(model)]
    model.zero_grad()
    return total, gradients


def _distance(found: list[Tensor], right: list[Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    difference = sum(float((one - other).double().square().sum()) for one, other in zip(found, right, strict=True))
    return (difference / sum(float(each.double().square().sum()) for each in right)) ** 0.5


@contextmanager
def _fp32(model: nn.Module) -> Iterator[None]:
    """Within it the model's weights are in fp32; then they are what they were, bit for bit."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    dtypes = [each.dtype for each in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        model.zero_grad()
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
