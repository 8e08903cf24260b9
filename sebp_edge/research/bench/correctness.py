"""The reference and the tolerances: a variant whose loss or gradients are wrong is not timed.

The reference is the loss and the gradients of the dense model in fp32, one unpadded sequence at a time. They equal
those of the padded batch, to which right padding adds exact zeros, and take far less memory. In bf16, a variant's
gradients may err by twice as much as those of the dense model without padding, plus 1e-4.

Shapes: B sequences, T positions.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.research.bench.variants import Step
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

# The least number of elements of each gradient that are compared, evenly spread; smaller gradients are compared whole.
SAMPLE = 4096
# The largest accepted relative error of a loss. In bf16, a dense 3B model with random weights was 6e-3 off.
LOSS_TOLERANCE, LOSS_TOLERANCE_FP32 = 2e-2, 1e-4

# By the names of the trained parameters.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """The relative errors of a variant's loss and of its gradients, the latter by their norm."""

    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class Reference:
    """The reference loss and gradients of a batch, and the tolerance.

    Attributes:
        gradients: sampled, fp32 on the CPU.
        allowed: the largest accepted deviation.
    """

    loss: float
    gradients: Gradients
    allowed: Deviation

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> "Reference":
        """Computes the reference with the model itself, whose weights are in fp32 meanwhile."""
        is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
        rounded = {} if is_fp32 else _unpadded_loss_and_gradients(model, batch)[1]
        with in_fp32(model):
            loss, gradients = _unpadded_loss_and_gradients(model, batch)
        rounding = 0.0 if is_fp32 else total_norm(errors(rounded, gradients))
        return cls(loss, gradients, Deviation(LOSS_TOLERANCE_FP32 if is_fp32 else LOSS_TOLERANCE, 2 * rounding + 1e-4))

    def deviation(self, loss: float, gradients: Gradients) -> Deviation:
        """The deviation of a loss and gradients from the reference.

        Raises:
            ValueError: the gradients belong to other parameters.
        """
        return Deviation(abs(loss / self.loss - 1), total_norm(errors(gradients, self.gradients)))

    def describe_error(self, found: Deviation) -> str | None:
        """Describes what exceeds the tolerance; returns None if all is within tolerance, which NaN never is."""
        if not found.loss_error <= self.allowed.loss_error:
            return f"its loss is off by {found.loss_error:.1e}, above {self.allowed.loss_error:.1e}"
        if not found.gradient_error <= self.allowed.gradient_error:
            return f"its gradients are off by {found.gradient_error:.1e}, above {self.allowed.gradient_error:.1e}"
        return None


def sample(gradient: Tensor) -> Tensor:
    """A copy of evenly spread elements of a gradient, fewer than 2 * SAMPLE, in fp32 on the CPU."""
    return gradient.flatten()[:: max(1, gradient.numel() // SAMPLE)].to("cpu", torch.float32, copy=True)


def loss_and_gradients(step: Step, model: nn.Module) -> tuple[float, Gradients]:
    """The mean loss of a step within `running`, and a sample of each gradient."""
    # The drop-in detects its rows in its first pass. Only later passes are timed, so one of those is checked.
    step.gradients()
    step.zero_grad()
    loss = float(step.gradients())
    gradients = _gradients(model)
    step.zero_grad()
    return loss, gradients


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """The norm of each parameter's error, relative to the norm of all reference gradients together.

    Raises:
        ValueError: the gradients belong to different parameters.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"the trained parameters differ, for example in {min(found.keys() ^ expected.keys())}")
    norm = total_norm(norms(expected))
    return {name: _norm(found[name] - each) / norm for name, each in expected.items()}


def norms(gradients: Gradients) -> dict[str, float]:
    return {name: _norm(each) for name, each in gradients.items()}


def total_norm(by_parameter: dict[str, float]) -> float:
    """The norm over all parameters, from the norm of each."""
    return math.hypot(*by_parameter.values())


def _unpadded_loss_and_gradients(model: nn.Module, batch: Batch) -> tuple[float, Gradients]:
    """The batch's mean loss and sampled gradients, computed one unpadded sequence at a time."""
    counts_B = (batch.labels[:, 1:] != IGNORE).sum(dim=1).tolist()
    lengths_B = batch.attention_mask.sum(dim=1).tolist()
    mean = 0.0
    for ids_T, labels_T, length, count in zip(batch.input_ids, batch.labels, lengths_B, counts_B, strict=True):
        loss = model(input_ids=ids_T[None, :length], labels=labels_T[None, :length], use_cache=False).loss
        weighted = loss * (count / sum(counts_B))
        weighted.backward()
        mean += float(weighted.detach())
    gradients = _gradients(model)
    model.zero_grad()
    return mean, gradients


def _gradients(model: nn.Module) -> Gradients:
    return {name: sample(each.grad) for name, each in model.named_parameters() if each.requires_grad}


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Converts the model's weights to fp32 within it, and restores them bit for bit afterwards."""
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
