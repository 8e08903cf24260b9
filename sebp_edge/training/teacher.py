"""Gives examples a teacher: what a model, as it is now, finds probable at each of their loss tokens.

Trained on these examples, a model learns to predict as its teacher does. The teacher may read another text before the
same loss tokens: with a note in its prompt, it teaches the student to answer without the note.
Shapes: C loss rows, K tokens of each (see `patches.loss.teacher_tokens`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from sebp_edge.errors import OptionError
from sebp_edge.events import Sink, silent
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.rows.soft_targets import SoftTargets
from sebp_edge.stopping import Check
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.training.losses import RowLosses
from sebp_edge.training.scoring import in_micro_batches

# The most probable tokens that a teacher gives at each loss token, besides drawn ones.
K = 20


def with_teacher(
    model: nn.Module,
    examples: Sequence[Example],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    check: Check = lambda: None,
    *,
    k: int = K,
    options: MemoryOptions = FASTEST,
) -> list[Example]:
    """Returns the examples with `model` as their teacher, which reads the same as the student; see `taught_by`."""
    return taught_by(
        model, [(example, example) for example in examples], collator, device, on_event, check, k=k, options=options
    )


@torch.no_grad()
def taught_by(
    model: nn.Module,
    pairs: Sequence[tuple[Example, Example]],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    check: Check = lambda: None,
    *,
    k: int = K,
    options: MemoryOptions = FASTEST,
) -> list[Example]:
    """Returns the students' examples with `model` as their teacher; restores the model.

    Args:
        model: the teacher, a decoder in evaluation mode; disable the adapter of one that is its own teacher.
        pairs: what the teacher reads and what the student reads, with the same loss tokens, in this order.
        on_event: receives the progress after each micro-batch; may raise to stop.
        check: is called after each micro-batch; may raise to stop.
        k: the number of the most probable tokens that are kept at each loss token, besides drawn ones.
        options: what to hold in memory at once.

    Raises:
        OptionError: k is below 1, or a pair has different numbers of loss tokens.
        RuntimeError, MemoryError: a single example does not fit into memory.
    """
    if k < 1:
        raise OptionError(f"A teacher got k={k}; expected 1 token or more at each loss token.")
    for teacher, student in pairs:
        _refuse_other_loss_tokens(teacher, student)
    # Each example once, without a teacher of its own; one without loss tokens teaches nothing.
    read = {id(teacher): replace(teacher, teacher=None) for teacher, _ in pairs if teacher.num_loss_tokens}
    if not read:
        return [student for _, student in pairs]
    taught = _teach(model, list(read.values()), collator, device, on_event, check, k, options)
    targets = {number: taught[id(example)] for number, example in read.items()}
    return [replace(student, teacher=targets.get(id(teacher))) for teacher, student in pairs]


def _refuse_other_loss_tokens(teacher: Example, student: Example) -> None:
    if teacher.num_loss_tokens != student.num_loss_tokens:
        raise OptionError(
            f"A teacher's example has {teacher.num_loss_tokens} loss tokens and its student's "
            f"{student.num_loss_tokens}; expected the same loss tokens in both."
        )


def _teach(
    model: nn.Module,
    examples: list[Example],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    check: Check,
    k: int,
    options: MemoryOptions,
) -> dict[int, SoftTargets]:
    """Returns the soft targets of each example, by its id."""
    taught: dict[int, SoftTargets] = {}
    # The training tells the user if the model runs on padded batches.
    with RowLosses(model, examples, collator, device, silent, options) as row_losses:

        def soft_targets(micro_batch: list[Example]) -> list[SoftTargets]:
            return _split(*(part.cpu() for part in row_losses.teacher_tokens(micro_batch, k)), micro_batch)

        for micro_batch, targets in in_micro_batches(soft_targets, examples, row_losses.limit, device, on_event):
            taught |= {id(example): own for example, own in zip(micro_batch, targets, strict=True)}
            check()
    return taught


def _split(ids_CK: torch.Tensor, shares_CK: torch.Tensor, examples: list[Example]) -> list[SoftTargets]:
    """Splits the tokens of a micro-batch's loss rows, which are in the order of the examples."""
    counts = [example.num_loss_tokens for example in examples]
    return [
        SoftTargets(ids.flatten().tolist(), shares.flatten().tolist(), ids.shape[1])
        for ids, shares in zip(ids_CK.split(counts), shares_CK.split(counts), strict=True)
    ]
