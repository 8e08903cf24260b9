"""What is right, and how far from it a way may be: no way is timed that computes another loss or other gradients.

Right are the loss and the gradients of the dense model in fp32, one sequence at a time: those of the padded batch, to
which padding on the right adds exact zeros, in far less memory. In bf16 a way may err by twice as much as the dense
model itself does without padding.

Shapes: B sequences, T positions.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.insight.bench.ways import Step
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

# So many gradients of each parameter are compared, evenly spread.
SAMPLE = 4096
# Relative errors of a loss that are still called right. In bf16, dense transformers were found 6e-3 off, of a 3B shape
# with random weights.
LOSS_TOLERANCE, LOSS_TOLERANCE_FP32 = 2e-2, 1e-4

# Of each trained parameter, by its name.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """How far a way is from what is right: the loss's relative error, and the gradients' by their norm."""

    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class Reference:
    """What is right for a batch, and how far from it is still called right.

    Attributes:
        gradients: samples, fp32 on the CPU.
        allowed: the largest deviation.
    """

    loss: float
    gradients: Gradients
    allowed: Deviation

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, loss_tolerance: float = LOSS_TOLERANCE) -> "Reference":
        """Computes it, in the model's own memory.

        Args:
            model: a dense decoder on its device, with the parameters to train requiring gradients.
            batch: right-padded, on the model's device.
            loss_tolerance: of a model that is not in fp32.
        """
        is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
        rounded = {} if is_fp32 else _one_by_one(model, batch)[1]
        with in_fp32(model):
            loss, gradients = _one_by_one(model, batch)
        rounding = 0.0 if is_fp32 else combined(errors(rounded, gradients))
        return cls(loss, gradients, Deviation(LOSS_TOLERANCE_FP32 if is_fp32 else loss_tolerance, 2 * rounding + 1e-4))

    def deviation(self, loss: float, gradients: Gradients) -> Deviation:
        """How far a loss and gradients are from these.

        Raises:
            ValueError: the gradients are those of other parameters.
        """
        return Deviation(abs(loss / self.loss - 1), combined(errors(gradients, self.gradients)))

    def what_is_wrong(self, found: Deviation) -> str | None:
        """In words, what is too far off; None if all is within tolerance, which NaN never is."""
        if not found.loss_error <= self.allowed.loss_error:
            return f"its loss is off by {found.loss_error:.1e}, above {self.allowed.loss_error:.1e}"
        if not found.gradient_error <= self.allowed.gradient_error:
            return f"its gradients are off by {found.gradient_error:.1e}, above {self.allowed.gradient_error:.1e}"
        return None


def sampled(gradient: Tensor) -> Tensor:
    """A copy of at most about SAMPLE of a gradient's elements, fp32 on the CPU."""
    return gradient.flatten()[:: max(1, gradient.numel() // SAMPLE)].to("cpu", torch.float32, copy=True)


def loss_and_gradients(
    step: Step, model: nn.Module, take: Callable[[Tensor], Tensor] = sampled
) -> tuple[float, Gradients]:
    """The mean loss of a step within `running`, and what `take` copies of each gradient."""
    # The drop-in's first pass finds its rows; what is timed, and so looked at here, are those after it.
    step.gradients()
    step.zero_grad()
    loss = float(step.gradients())
    gradients = _gradients(model, take)
    step.zero_grad()
    return loss, gradients


def errors(found: Gradients, right: Gradients) -> dict[str, float]:
    """The norm of each parameter's difference, over the norm of all that is right.

    Raises:
        ValueError: they are those of different parameters.
    """
    if found.keys() != right.keys():
        raise ValueError(f"it trains other parameters, such as {min(found.keys() ^ right.keys())}")
    norm = combined(norms(right))
    return {name: _norm(found[name] - each) / norm for name, each in right.items()}


def norms(gradients: Gradients) -> dict[str, float]:
    return {name: _norm(each) for name, each in gradients.items()}


def combined(by_parameter: dict[str, float]) -> float:
    """The norm of all parameters together."""
    return math.hypot(*by_parameter.values())


def _one_by_one(model: nn.Module, batch: Batch) -> tuple[float, Gradients]:
    """The batch's mean loss and its sampled gradients, from sequences without padding."""
    counts_B = (batch.labels[:, 1:] != IGNORE).sum(dim=1).tolist()
    lengths_B = batch.attention_mask.sum(dim=1).tolist()
    mean = 0.0
    for ids_T, labels_T, length, count in zip(batch.input_ids, batch.labels, lengths_B, counts_B, strict=True):
        loss = model(input_ids=ids_T[None, :length], labels=labels_T[None, :length], use_cache=False).loss
        weighted = loss * (count / sum(counts_B))
        weighted.backward()
        mean += float(weighted.detach())
    gradients = _gradients(model, sampled)
    model.zero_grad()
    return mean, gradients


def _gradients(model: nn.Module, take: Callable[[Tensor], Tensor]) -> Gradients:
    return {name: take(each.grad) for name, each in model.named_parameters() if each.requires_grad}


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Within it the model's weights are in fp32; afterwards they are what they were, bit for bit."""
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
