"""The losses whose gradients an analysis measures: of next tokens in a decoder, of a class in an encoder.

An encoder's classes are drawn at random, since the user's texts have none. Which rows are zero does not depend on them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import reads_first_token
from sebp_edge.engine.sparse.rows.batches import Batch, Collator
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.errors import ModelError
from sebp_edge.values.example import Example

EVERY_TOKEN, TRAINED_TOKENS, CLASSES = "every token", "trained tokens", "random classes"


@dataclass(frozen=True)
class Objective:
    """A loss, and what it is computed on.

    Attributes:
        name: what has a loss.
        batches: of one example each, on the host.
        loss: the summed loss in nats of a model's outputs on a batch.
    """

    name: str
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def objectives_of(model: nn.Module, examples: list[Example], collator: Collator, seed: int) -> list[Objective]:
    """Returns the losses of these examples: one, or two if only some tokens of a decoder's examples are trained."""
    if reads_first_token(model):
        return [Objective(CLASSES, _with_classes(model, examples, collator, seed), class_loss)]
    losses = {EVERY_TOKEN: [Example(one.input_ids, one.input_ids, one.document) for one in examples]}
    # The first token is never predicted, so its label does not count.
    if any(one.labels[1:] != one.input_ids[1:] for one in examples):
        losses[TRAINED_TOKENS] = examples
    return [
        Objective(name, [collator([one]) for one in labelled], next_token_loss) for name, labelled in losses.items()
    ]


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a decoder from all logits, as transformers computes it."""
    logits_NV = model(**_inputs(model, batch), use_cache=False).logits[:, :-1].flatten(0, 1)
    return _cross_entropy(logits_NV, batch.labels[:, 1:])


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of an encoder's classes, which are the labels of the first tokens."""
    return _cross_entropy(model(**_inputs(model, batch)).logits, batch.labels[:, 0])


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {"input_ids": batch.input_ids.to(device), "attention_mask": batch.attention_mask.to(device)}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.flatten().to(logits.device)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def _with_classes(model: nn.Module, examples: list[Example], collator: Collator, seed: int) -> list[Batch]:
    num_classes = model.config.num_labels
    if num_classes < 2:
        raise ModelError(f"The model's head has {num_classes} output; expected a head with two classes or more.")
    draw, batches = random.Random(seed), []
    for batch in (collator([example]) for example in examples):
        labels = torch.full_like(batch.labels, IGNORE)
        labels[:, 0] = draw.randrange(num_classes)
        plan = RowPlan.from_masks(batch.attention_mask.bool(), labels != IGNORE, labels)
        batches.append(replace(batch, labels=labels, plan=plan))
    return batches
