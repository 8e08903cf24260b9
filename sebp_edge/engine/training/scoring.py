"""Scores a model on examples without training it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import Attempt
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import RowLimit
from sebp_edge.engine.training.evaluation import HeldOutLoss, sum_by_document
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.words import WordReader
from sebp_edge.events import ExamplesEvaluated, Sink, silent
from sebp_edge.machine.devices import release_memory
from sebp_edge.values.example import Example, Outline, outlines

Result = TypeVar("Result")


@contextmanager
def scoring(
    model: nn.Module,
    examples: list[Example],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    options: MemoryOptions = FASTEST,
    check: Check = lambda: None,
    words: WordReader | None = None,
) -> Iterator[Callable[[], HeldOutLoss]]:
    """Context of a function that computes the losses of examples by document, as an evaluation during a training does.

    It may be called again after the values of weights have changed, in place. At the end the model is restored.
    """
    # The training tells the user if the model runs on padded batches.
    with torch.no_grad(), RowLosses(model, examples, collator, device, silent, options, check) as row_losses:

        def losses(micro_batch: list[Outline]) -> tuple[Tensor, Tensor]:
            found, sequences_C = row_losses(micro_batch) if words is None else row_losses.read(micro_batch, words)
            return found.cpu(), sequences_C

        def compute() -> HeldOutLoss:
            computed = in_micro_batches(losses, outlines(examples), row_losses.limit, device, on_event)
            return sum_by_document(((micro_batch, *result) for micro_batch, result in computed), words, examples)

        yield compute


def in_micro_batches(
    compute: Callable[[list[Outline]], Result],
    examples: list[Outline],
    limit: RowLimit,
    device: torch.device,
    on_event: Sink,
) -> Iterator[tuple[list[Outline], Result]]:
    """Yields each micro-batch without gradients and its result; continues with smaller ones if memory runs out."""
    done = 0
    remaining = limit.cut(examples, is_evaluated=True)
    while remaining:
        computed = remaining[0].examples
        can_be_cut = partial(bool, computed[1:])
        with Attempt(can_be_cut) as attempt:
            result = compute(computed)
        if attempt.did_not_fit:
            release_memory(device)
            limit = limit.halved(remaining[0])
            remaining = limit.cut(chain.from_iterable(each.examples for each in remaining), is_evaluated=True)
            continue
        del remaining[0]
        done += len(computed)
        on_event(ExamplesEvaluated(done, len(examples)))
        yield computed, result
