"""The reference: the loss and the gradients of each batch in fp32, one text at a time. What is wrong is not timed.

They equal those of the padded batch, to which right padding adds exact zeros, and take far less memory. A batch holds
the first texts of every larger one. So one pass over the largest batch gives the sums of all.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from speed.trainers.steps import Step
from speed.trainers.work import Job

# The least number of elements of each gradient that are compared, evenly spread; smaller gradients are compared whole.
SAMPLE = 4096
# The largest accepted relative error of a loss, in bf16 and in fp32.
LOSS_TOLERANCE, LOSS_TOLERANCE_FP32 = 0.005, 1e-4

# By the names of the trained parameters.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """The relative errors of a loss and of its gradients, the latter by their norm."""

    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class Reference:
    """The loss and the gradients of a batch, and the tolerance.

    Attributes:
        gradients: sampled, fp32 on the CPU.
        allowed: the largest accepted deviation.
    """

    loss: float
    gradients: Gradients
    allowed: Deviation

    def deviation(self, loss: float, gradients: Gradients) -> Deviation:
        """The deviation of a loss and gradients from the reference.

        Raises:
            ValueError: the gradients belong to other parameters.
        """
        return Deviation(abs(loss / self.loss - 1), error_of(gradients, self.gradients))

    def describe_error(self, found: Deviation) -> str | None:
        """Describes what exceeds the tolerance; returns None if all is within tolerance, which NaN never is."""
        if not found.loss_error <= self.allowed.loss_error:
            return f"its loss is off by {found.loss_error:.1e}, above {self.allowed.loss_error:.1e}"
        if not found.gradient_error <= self.allowed.gradient_error:
            return f"its gradients are off by {found.gradient_error:.1e}, above {self.allowed.gradient_error:.1e}"
        return None


def references(
    model: nn.Module, batch: Batch, counts: list[int], loss_tolerance: float = LOSS_TOLERANCE
) -> dict[int, Reference]:
    """The reference of the first `count` texts of a batch, for each of `counts`.

    In bf16 gradients may err by twice as much as those of this pass in bf16, plus 1e-4.

    Args:
        model: dense, with its weights in the precision that the trainers use; its parameters hold no gradients.
        batch: right-padded, on the model's device.
        loss_tolerance: the largest accepted relative error of a loss in bf16.
    """
    is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
    rounded = {} if is_fp32 else _means(model, batch, counts)
    with in_fp32(model):
        exact = _means(model, batch, counts)
    found = {}
    for count, (loss, gradients) in exact.items():
        rounding = 0.0 if is_fp32 else error_of(rounded[count][1], gradients)
        allowed = Deviation(LOSS_TOLERANCE_FP32 if is_fp32 else loss_tolerance, 2 * rounding + 1e-4)
        found[count] = Reference(loss, gradients, allowed)
    return found


def _means(model: nn.Module, batch: Batch, counts: list[int]) -> dict[int, tuple[float, Gradients]]:
    """The mean loss of the first `count` texts and its sample gradients, for each of `counts`."""
    lengths_B = batch.attention_mask.sum(dim=1).tolist()
    total, rows, found = 0.0, 0, {}
    for number, length in enumerate(lengths_B[: max(counts)], 1):
        ids_1T, labels_1T = batch.input_ids[number - 1 : number, :length], batch.labels[number - 1 : number, :length]
        loss_rows = int((labels_1T[:, 1:] != IGNORE).sum())
        loss = loss_rows * model(input_ids=ids_1T, labels=labels_1T, use_cache=False).loss
        loss.backward()
        total, rows = total + float(loss.detach()), rows + loss_rows
        if number in counts:
            found[number] = total / rows, {name: each / rows for name, each in sampled_gradients(model).items()}
    model.zero_grad()
    return found


def loss_and_gradients(step: Step, model: nn.Module) -> tuple[float, Gradients]:
    """The mean loss of a step within `running`, and a sample of each gradient."""
    # The drop-in detects its rows in its first pass. Only later passes are timed, so one of those is checked.
    step.gradients()
    step.zero_grad()
    loss = float(step.gradients())
    gradients = sampled_gradients(model)
    step.zero_grad()
    return loss, gradients


def sampled_gradients(model: nn.Module) -> Gradients:
    """A sample of each trained parameter's gradient."""
    return {name: _sample(each.grad) for name, each in model.named_parameters() if each.requires_grad}


def _sample(gradient: Tensor) -> Tensor:
    """A copy of evenly spread elements, fewer than 2 * SAMPLE, in fp32 on the CPU."""
    return gradient.flatten()[:: max(1, gradient.numel() // SAMPLE)].to("cpu", torch.float32, copy=True)


def error_of(found: Gradients, expected: Gradients) -> float:
    """The norm of the error of all gradients together, relative to their norm.

    Raises:
        ValueError: the gradients belong to different parameters.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"the trained parameters differ, for example in {min(found.keys() ^ expected.keys())}")
    return _norm(found[name] - each for name, each in expected.items()) / _norm(expected.values())


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients))


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


def save_references(found: dict[int, Reference], job: Job) -> None:
    """Writes the references into the job's folder, as plain values, which are read without pickle."""
    values = {count: vars(each) | {"allowed": vars(each.allowed)} for count, each in found.items()}
    torch.save(values, job.reference)


def read_references(job: Job) -> dict[int, Reference]:
    values = torch.load(job.reference, weights_only=True)
    return {count: Reference(**each | {"allowed": Deviation(**each["allowed"])}) for count, each in values.items()}
