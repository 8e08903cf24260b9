"""The schedule of a training: epochs of optimizer steps, and what is evaluated between them, in micro-batches.

It is laid out before anything is computed. The memory plan costs it, the training carries it out, and where memory runs
out it is cut smaller.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from sebp_edge.recipe import Recipe
from sebp_edge.rows.buckets import Bucket
from sebp_edge.texts.examples import Example
from sebp_edge.texts.splits import split_documents

# Rows of a micro-batch that is only evaluated, on a CPU: larger ones are not faster, and stop later.
EVALUATED_ON_A_CPU = 1024


class MicroBatch(NamedTuple):
    """Examples that are computed together.

    Attributes:
        examples: the longest first.
        sizes: rows, sequences, rows of the longest sequence, and loss rows.
    """

    examples: list[Example]
    sizes: Bucket


@dataclass(frozen=True)
class RowLimit:
    """How many rows are computed at once.

    Attributes:
        max_rows: most rows of a micro-batch; a single longer example stands alone.
        padded_to: rows of each example, if it is padded; None if only its active tokens are computed.
        max_evaluated_rows: `max_rows` of a micro-batch that is only evaluated; None if there is no lower limit.
    """

    max_rows: int
    padded_to: int | None = None
    max_evaluated_rows: int | None = None

    @classmethod
    def on(cls, device: torch.device, max_rows: int, padded_to: int | None = None) -> "RowLimit":
        """The limit on a device."""
        return cls(max_rows, padded_to, EVALUATED_ON_A_CPU if device.type == "cpu" else None)

    def cut(self, examples: Iterable[Example], *, is_evaluated: bool = False) -> list[MicroBatch]:
        """Cuts examples into micro-batches.

        The longest come first: what does not fit into memory fails at once, sequences of about one length go together,
        and the shorter the examples, the less of a micro-batch stays empty.
        """
        max_rows = self.max_rows
        if is_evaluated:
            max_rows = min(max_rows, self.max_evaluated_rows or max_rows)
        groups, filled = [], 0
        for example in sorted(examples, key=self._rows_of, reverse=True):
            rows = self._rows_of(example)
            if not groups or filled + rows > max_rows:
                groups.append([])
                filled = 0
            groups[-1].append(example)
            filled += rows
        return [MicroBatch(group, self._sizes_of(group)) for group in groups]

    def halved(self, micro_batch: MicroBatch) -> "RowLimit":
        """The limit after a micro-batch of several examples did not fit into memory: half of its rows."""
        return replace(self, max_rows=min(self.max_rows, -(-micro_batch.sizes.tokens // 2)))

    def _rows_of(self, example: Example) -> int:
        return example.num_active_tokens if self.padded_to is None else self.padded_to

    def _sizes_of(self, examples: list[Example]) -> Bucket:
        rows = [self._rows_of(example) for example in examples]
        return Bucket(sum(rows), len(rows), max(rows), sum(example.num_loss_tokens for example in examples))


class Group:
    """Examples in micro-batches: those of an optimizer step, or some that are evaluated.

    Attributes:
        examples: in no order that matters.
        micro_batches: the same examples, as they are computed.
    """

    def __init__(self, examples: list[Example], limit: RowLimit, *, is_evaluated: bool = False):
        self.examples, self._is_evaluated = examples, is_evaluated
        self.cut(limit)

    def cut(self, limit: RowLimit) -> None:
        """Cuts the micro-batches anew."""
        self.micro_batches = limit.cut(self.examples, is_evaluated=self._is_evaluated)

    @property
    def num_loss_tokens(self) -> int:
        return sum(example.num_loss_tokens for example in self.examples)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.input_ids) for example in self.examples)


class Schedule:
    """One training's steps and evaluations, in micro-batches since `lay_out`.

    Args:
        batches: by epoch, the examples of each batch that the recipe asks for.
        select: examples that the best state is selected on.
        judge: examples that the result is judged on.
        learns_all: whether `judge` is what is trained on, and is evaluated after the training only.

    Attributes:
        epochs: the steps of each epoch.
        last_epoch: the last epoch that is trained; later ones count for the learning rate only.
        select: is evaluated before the first epoch and after each.
        judge: is evaluated before and after the training.
    """

    def __init__(
        self,
        batches: list[list[list[Example]]],
        select: Sequence[Example] = (),
        judge: Sequence[Example] = (),
        *,
        learns_all: bool = False,
    ):
        self._batches, self._select, self._judge = batches, list(select), list(judge)
        self.learns_all, self.last_epoch = learns_all, len(batches)
        self._one_micro_batch_each = False
        self.epochs: list[list[Group]] = []
        self.select = self.judge = Group([], RowLimit(1))

    def lay_out(self, limit: RowLimit, *, one_micro_batch_each: bool = False) -> None:
        """Makes the steps and evaluations.

        Args:
            one_micro_batch_each: whether a step has no more than one micro-batch; then a batch is several steps.
        """
        self._one_micro_batch_each = one_micro_batch_each
        self.epochs = [
            list(chain.from_iterable(self._steps_of(batch, limit) for batch in epoch)) for epoch in self._batches
        ]
        self.select, self.judge = (Group(part, limit, is_evaluated=True) for part in (self._select, self._judge))

    def cut(self, limit: RowLimit) -> None:
        """Cuts micro-batches anew in the middle of a training, whose steps stay the same."""
        for group in (self.select, self.judge):
            group.cut(limit)
        if not self._one_micro_batch_each:
            for step in chain.from_iterable(self.epochs):
                step.cut(limit)

    @property
    def num_documents(self) -> tuple[int, int, int]:
        """How many documents are trained on, are selected on, and are judged on without being trained on."""
        train = chain.from_iterable(self._batches[0])
        parts = (train, self._select, [] if self.learns_all else self._judge)
        return tuple(len({example.document for example in part}) for part in parts)

    @property
    def num_tokens(self) -> int:
        """Real tokens of all epochs."""
        return sum(len(example.input_ids) for epoch in self._batches for batch in epoch for example in batch)

    @property
    def num_steps(self) -> int:
        """All steps, those after `last_epoch` included."""
        return sum(map(len, self.epochs))

    @property
    def has_smaller_steps(self) -> bool:
        """Whether a batch that the recipe asks for is several steps."""
        return self.num_steps > sum(map(len, self._batches))

    @property
    def trained(self) -> list[MicroBatch]:
        """The micro-batches with gradients, up to `last_epoch`."""
        steps = chain.from_iterable(self.epochs[: self.last_epoch])
        return [micro_batch for step in steps for micro_batch in step.micro_batches]

    @property
    def evaluated(self) -> Iterator[tuple[int, MicroBatch]]:
        """The micro-batches without gradients, and how often each is computed."""
        for group, times in ((self.select, self.last_epoch + 1), (self.judge, 1 if self.learns_all else 2)):
            yield from ((times, micro_batch) for micro_batch in group.micro_batches)

    def _steps_of(self, batch: list[Example], limit: RowLimit) -> list[Group]:
        step = Group(batch, limit)
        if not self._one_micro_batch_each or len(step.micro_batches) == 1:
            return [step]
        return [Group(micro_batch.examples, limit) for micro_batch in step.micro_batches]


def schedules_of(examples: list[Example], recipe: Recipe, seed: int) -> list[Schedule]:
    """All trainings of an adaptation: one, or one for each fold and a last one on all documents.

    Raises:
        TextsError: too few tokens to learn from and to judge on.
    """

    def batches(train: list[Example]) -> list[list[list[Example]]]:
        return shuffled_batches(train, recipe.batch_tokens, recipe.epochs, seed)

    splits = split_documents(examples, seed)
    schedules = [Schedule(batches(split.train), split.select, split.judge) for split in splits]
    return schedules + [Schedule(batches(examples), judge=examples, learns_all=True)] * (len(splits) > 1)


def shuffled_batches(examples: list[Example], batch_tokens: int, epochs: int, seed: int) -> list[list[list[Example]]]:
    """Each epoch's batches, each a list of examples with about `batch_tokens` loss tokens.

    Every example is in exactly one batch of each epoch; the order follows `seed` alone.
    """
    order = random.Random(seed)
    return [list(_batches_of(order.sample(examples, len(examples)), batch_tokens)) for _ in range(epochs)]


def _batches_of(examples: list[Example], batch_tokens: int) -> Iterator[list[Example]]:
    # As many batches as fit whole, and equally full: one of a few tokens would count as much as the others.
    total = sum(example.num_loss_tokens for example in examples)
    share = total / max(1, round(total / batch_tokens))
    batch, before, filled = [], 0, 0
    for example in examples:
        batch.append(example)
        filled += example.num_loss_tokens
        if filled // share > before // share and min(filled - before, total - filled) >= share / 2:
            yield batch
            batch, before = [], filled
    if batch:
        yield batch
