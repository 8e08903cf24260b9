"""The reference of peers.py: the loss and the gradients of each batch in fp32, one text at a time.

A batch holds the first texts of every larger one. So one pass over the largest batch gives the sums of all.
"""

import torch
from torch import nn

from sebp_edge.research.bench.correctness import (
    LOSS_TOLERANCE_FP32,
    Deviation,
    Gradients,
    Reference,
    errors,
    in_fp32,
    sample,
    total_norm,
)
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch
from speed.trainers.work import Job

# The largest accepted relative error of a loss in bf16.
LOSS_TOLERANCE = 0.005


def references(model: nn.Module, batch: Batch, counts: list[int]) -> dict[int, Reference]:
    """The reference of the first `count` texts of a batch, for each of `counts`.

    In bf16 gradients may err by twice as much as those of this pass in bf16, plus 1e-4.

    Args:
        model: dense, with its weights in the precision that the trainers use; its parameters hold no gradients.
        batch: right-padded, on the model's device.
    """
    is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
    rounded = {} if is_fp32 else _means(model, batch, counts)
    with in_fp32(model):
        exact = _means(model, batch, counts)
    found = {}
    for count, (loss, gradients) in exact.items():
        rounding = 0.0 if is_fp32 else total_norm(errors(rounded[count][1], gradients))
        allowed = Deviation(LOSS_TOLERANCE_FP32 if is_fp32 else LOSS_TOLERANCE, 2 * rounding + 1e-4)
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
            gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
            found[number] = total / rows, {name: sample(each) / rows for name, each in gradients.items()}
    model.zero_grad()
    return found


def save_references(found: dict[int, Reference], job: Job) -> None:
    """Writes the references into the job's folder, as plain values, which are read without pickle."""
    values = {count: vars(each) | {"allowed": vars(each.allowed)} for count, each in found.items()}
    torch.save(values, job.reference)


def read_references(job: Job) -> dict[int, Reference]:
    values = torch.load(job.reference, weights_only=True)
    return {count: Reference(**each | {"allowed": Deviation(**each["allowed"])}) for count, each in values.items()}
