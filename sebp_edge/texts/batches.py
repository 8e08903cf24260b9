"""Examples become batches: right-padded to the context length, each with its RowPlan.

Which go together: examples in shuffled order make optimizer steps of equal weight, and each step is cut into
micro-batches that fill the rows which fit into memory at once.

Shapes: B sequences, T = context length.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sebp_edge.rows.buckets import Bucket
from sebp_edge.rows.row_plan import IGNORE, RowPlan
from sebp_edge.texts.examples import Example


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        input_ids, attention_mask, labels: int64 [B, T]; padding is on the right, its labels are -100.
        plan: which rows carry gradient.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    plan: RowPlan


@dataclass(frozen=True)
class Collator:
    """Pads examples into batches.

    Attributes:
        context_length: T.
        pad_token_id: what stands in the padding; any id will do, the mask and the labels tell padding from text.
    """

    context_length: int
    pad_token_id: int

    def __call__(self, examples: list[Example]) -> Batch:
        """Right-pads `examples` to the context length and plans their rows."""
        size = (len(examples), self.context_length)
        input_ids = torch.full(size, self.pad_token_id)
        attention_mask = torch.zeros(size, dtype=torch.int64)
        labels = torch.full(size, IGNORE)
        for row, example in enumerate(examples):
            length = len(example.input_ids)
            input_ids[row, :length] = torch.tensor(example.input_ids)
            attention_mask[row, :length] = 1
            labels[row, :length] = torch.tensor(example.labels)
        return Batch(input_ids, attention_mask, labels, RowPlan.from_labels(labels))


def shuffled_steps(examples: list[Example], batch_tokens: int, epochs: int, seed: int) -> list[list[list[Example]]]:
    """Each epoch's optimizer steps, each a list of examples with about `batch_tokens` loss tokens.

    Every example is in exactly one step of each epoch; the order follows `seed` alone.
    """
    order = random.Random(seed)
    return [list(_steps(order.sample(examples, len(examples)), batch_tokens)) for _ in range(epochs)]


def _steps(examples: list[Example], batch_tokens: int) -> Iterator[list[Example]]:
    # As many steps as fit whole, and equally full: one of a few tokens would count as much as the others.
    total = sum(example.num_loss_tokens for example in examples)
    share = total / max(1, round(total / batch_tokens))
    step, before, filled = [], 0, 0
    for example in examples:
        step.append(example)
        filled += example.num_loss_tokens
        if filled // share > before // share and min(filled - before, total - filled) >= share / 2:
            yield step
            step, before = [], filled
    if step:
        yield step


def micro_batches(
    examples: Iterable[Example], max_rows: int, num_rows: Callable[[Example], int]
) -> list[list[Example]]:
    """Cuts examples into micro-batches of at most `max_rows` rows; a single longer example stands alone.

    The longest come first: what does not fit into memory fails at once, sequences of about one length go together, and
    the shorter the examples, the less of a micro-batch stays empty.

    Args:
        num_rows: how many rows an example takes.
    """
    groups, filled = [], 0
    for example in sorted(examples, key=num_rows, reverse=True):
        if not groups or filled + num_rows(example) > max_rows:
            groups.append([])
            filled = 0
        groups[-1].append(example)
        filled += num_rows(example)
    return groups


def bucket_for(examples: list[Example]) -> Bucket:
    """The bucket on the grid that holds the active tokens of one micro-batch."""
    lengths = [example.num_active_tokens for example in examples]
    loss_rows = sum(example.num_loss_tokens for example in examples)
    return Bucket.holding(sum(lengths), len(lengths), max(lengths), loss_rows)
