"""Scores a model on examples without training it."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from sebp_edge.events import ExamplesEvaluated, Sink, silent
from sebp_edge.machine.devices import ran_out_of_memory, release_memory
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.training.evaluation import HeldOutLoss, sum_by_document
from sebp_edge.training.losses import RowLosses


@torch.no_grad()
def score(
    model: nn.Module,
    examples: list[Example],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    options: MemoryOptions = FASTEST,
) -> HeldOutLoss:
    """Computes the losses of examples by document, as an evaluation during a training does; restores the model.

    Args:
        model: a decoder in evaluation mode, with or without an adapter; needs no trainable parameters.
        on_event: receives the progress after each micro-batch; may raise to stop.
        options: what to hold in memory at once.

    Raises:
        RuntimeError, MemoryError: a single example does not fit into memory.
    """
    # The training tells the user if the model runs on padded batches.
    with RowLosses(model, examples, collator, device, silent, options) as row_losses:
        return sum_by_document(_losses(row_losses, examples, device, on_event))


def _losses(
    row_losses: RowLosses, examples: list[Example], device: torch.device, on_event: Sink
) -> Iterator[tuple[list[Example], Tensor, Tensor]]:
    """Yields what `sum_by_document` takes; continues with smaller micro-batches if memory runs out."""
    limit, done = row_losses.limit, 0
    remaining = limit.cut(examples, is_evaluated=True)
    while remaining:
        result = _try(row_losses, remaining[0].examples)
        if result is None:
            release_memory(device)
            limit = limit.halved(remaining[0])
            remaining = limit.cut(chain.from_iterable(each.examples for each in remaining), is_evaluated=True)
            continue
        computed = remaining.pop(0).examples
        done += len(computed)
        on_event(ExamplesEvaluated(done, len(examples)))
        yield computed, *result


def _try(row_losses: RowLosses, examples: list[Example]) -> tuple[Tensor, Tensor] | None:
    """Returns the losses of the loss rows and the example of each, on the host; None if memory ran out."""
    try:
        losses, sequences = row_losses(examples)
        return losses.cpu(), sequences
    except (RuntimeError, MemoryError) as error:
        if len(examples) == 1 or not ran_out_of_memory(error):
            raise
        return None
