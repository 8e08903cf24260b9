"""Makes the schedule of a training: epochs of optimizer steps and the evaluations between them, in micro-batches.

A schedule is laid out before anything is computed. The memory plan predicts its cost; the training runs it, and cuts it
into smaller micro-batches if memory runs out. Examples are outlines here: only the learner looks up their tokens.
"""

import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.recipe import Recipe
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import NO_DOCUMENT, Outline
from sebp_edge.values.lessons import Lessons

# Maximum rows of a micro-batch without gradients on a CPU. Larger ones are no faster, and take longer to stop.
MAX_EVALUATED_ROWS_CPU = 1024
# So many rows are evaluated together even if steps have fewer.
MIN_EVALUATED_ROWS = 512


class MicroBatch(NamedTuple):
    """Examples that are computed together, as outlines, the longest first."""

    examples: list[Outline]
    sizes: Bucket


@dataclass(frozen=True)
class RowLimit:
    """The maximum number of rows of a micro-batch."""

    max_rows: int  # a longer example is a micro-batch by itself
    padded_to: int | None = None  # the rows of each padded example; None if only active tokens are computed
    # A lower limit for micro-batches without gradients; None if `max_rows` applies.
    max_evaluated_rows: int | None = None
    pads: bool = False  # whether examples are padded to the longest of their micro-batch

    @classmethod
    def on(cls, device: str, max_rows: int, padded_to: int | None = None, *, pads: bool = False) -> "RowLimit":
        """Returns the limit for a kind of device."""
        return cls(max_rows, padded_to, MAX_EVALUATED_ROWS_CPU if device == "cpu" else None, pads)

    def cut(self, examples: Iterable[Outline], *, is_evaluated: bool = False) -> list[MicroBatch]:
        """Cuts examples into micro-batches, longest examples first.

        In this order, a micro-batch that does not fit into memory fails early, sequences of similar length share a
        micro-batch, and micro-batches of short examples are nearly full.
        """
        max_rows = self.max_rows
        if is_evaluated:
            max_rows = min(max_rows, self.max_evaluated_rows or max_rows)
        groups, filled = [], 0
        for example in sorted(examples, key=self._num_rows, reverse=True):
            rows = self._num_rows(groups[-1][0] if self.pads and groups else example)
            if not groups or filled + rows > max_rows:
                groups.append([])
                filled, rows = 0, self._num_rows(example)
            groups[-1].append(example)
            filled += rows
        return [MicroBatch(group, self._sizes_of(group)) for group in groups]

    def halved(self, micro_batch: MicroBatch) -> "RowLimit":
        """Returns the limit after this micro-batch of several examples ran out of memory: half of its rows."""
        return replace(self, max_rows=min(self.max_rows, -(-micro_batch.sizes.tokens // 2)))

    def evaluating_like(self, schedules: Iterable["Schedule"]) -> "RowLimit":
        """Returns a limit by which evaluations have no larger micro-batches than the steps of laid out schedules.

        Larger tensors would not fit where the memory of graphs has held those of the steps.
        """
        sizes = (micro_batch.sizes.tokens for schedule in schedules for micro_batch in schedule.trained)
        rows = max(MIN_EVALUATED_ROWS, max(sizes, default=self.max_rows))
        return replace(self, max_evaluated_rows=min(rows, self.max_evaluated_rows or rows))

    def _num_rows(self, example: Outline) -> int:
        return example.num_active_tokens if self.padded_to is None else self.padded_to

    def _sizes_of(self, examples: list[Outline]) -> Bucket:
        rows = [self._num_rows(example) for example in examples]
        if self.pads:
            rows = len(rows) * [max(rows)]
        return Bucket(sum(rows), len(rows), max(rows), sum(example.num_loss_tokens for example in examples))


class Group:
    """The examples of one optimizer step or one evaluation, cut into micro-batches."""

    def __init__(self, examples: list[Outline], limit: RowLimit, *, is_evaluated: bool = False):
        self.examples, self._is_evaluated = examples, is_evaluated
        self.cut(limit)

    def cut(self, limit: RowLimit) -> None:
        """Cuts the examples into micro-batches within `limit`."""
        self.micro_batches = limit.cut(self.examples, is_evaluated=self._is_evaluated)

    @property
    def num_loss_tokens(self) -> int:
        return sum(example.num_loss_tokens for example in self.examples)

    @property
    def num_tokens(self) -> int:
        return sum(example.num_tokens for example in self.examples)


class Schedule:
    """The steps and evaluations of one training; `lay_out` makes them.

    Args:
        trains_on_all: whether this is the last training, on all documents. `test` then holds the validation documents
            of the other trainings, and is evaluated only after this one.
        learns_on: whether it begins in a state that was trained before. That state is not evaluated, and never the best
            one, since it has not learnt what is new.
        knows_start: whether the losses before the first epoch need no evaluation of the validation documents.

    Attributes:
        last_epoch: the last epoch to train; later ones only shape the learning rate schedule.
        validation: the validation examples, evaluated after each epoch, and before the first one unless `knows_start`.
        test: the test examples, evaluated before and after the training, or only after it (`trains_on_all`).
    """

    def __init__(
        self,
        batches: list[list[list[Outline]]],
        validation: Sequence[Outline] = (),
        test: Sequence[Outline] = (),
        *,
        trains_on_all: bool = False,
        learns_on: bool = False,
        knows_start: bool = False,
    ):
        self._batches, self._validation, self._test = batches, list(validation), list(test)
        self.trains_on_all, self.learns_on, self.last_epoch = trains_on_all, learns_on, len(self._batches)
        self._validates_start = not (learns_on or knows_start)
        self._one_micro_batch_each = False
        self.epochs: list[list[Group]] = []
        self.validation = self.test = Group([], RowLimit(1))

    def lay_out(self, limit: RowLimit, *, one_micro_batch_each: bool = False) -> None:
        """Makes the steps and evaluations, cut into micro-batches; a larger batch may become a step for each."""
        self._one_micro_batch_each = one_micro_batch_each
        # Frees the layout before, so that only one is in memory.
        self.epochs = []
        for epoch in self._batches:
            self.epochs.append(list(chain.from_iterable(self._steps_of(batch, limit) for batch in epoch)))
        self.validation, self.test = (Group(part, limit, is_evaluated=True) for part in (self._validation, self._test))

    def stop_after(self, epochs: int) -> None:
        """Trains only the first epochs, at least one; the learning rates stay those of all epochs."""
        self.last_epoch = min(max(1, epochs), len(self._batches))

    def cut(self, limit: RowLimit) -> None:
        """Cuts the micro-batches again during a training; the steps stay the same."""
        self.cut_evaluations(limit)
        if not self._one_micro_batch_each:
            for step in chain.from_iterable(self.epochs):
                step.cut(limit)

    def cut_evaluations(self, limit: RowLimit) -> None:
        """Cuts the micro-batches of evaluations again."""
        for group in (self.validation, self.test):
            group.cut(limit)

    @property
    def num_documents(self) -> tuple[int, int, int]:
        """The number of train, validation and test documents; those that are also trained on count as train only.

        Examples of general text belong to no document.
        """
        parts = (chain.from_iterable(self._batches[0]), self._validation, self._test)
        trained, *held_out = ({example.document for example in part} - {NO_DOCUMENT} for part in parts)
        return len(trained), *(len(part - trained) for part in held_out)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all epochs, without padding."""
        return sum(example.num_tokens for epoch in self._batches for batch in epoch for example in batch)

    @property
    def num_batches(self) -> int:
        """The number of batches in all epochs: steps, unless they are split."""
        return sum(map(len, self._batches))

    @property
    def num_evaluated(self) -> tuple[int, int]:
        """The numbers of examples and of their tokens that all evaluations of this training compute."""
        times = (len(self._batches) + self._validates_start, 1 if self.trains_on_all else 2)
        parts = list(zip(times, (self._validation, self._test), strict=True))
        return (
            sum(number * len(part) for number, part in parts),
            sum(number * example.num_tokens for number, part in parts for example in part),
        )

    @property
    def num_steps(self) -> int:
        """The number of steps, including those after `last_epoch`."""
        return sum(map(len, self.epochs))

    @property
    def has_smaller_steps(self) -> bool:
        """Whether a batch of the recipe is split into several steps."""
        return self.num_steps > self.num_batches

    @property
    def trained(self) -> list[MicroBatch]:
        """The micro-batches with gradients, up to `last_epoch`."""
        steps = chain.from_iterable(self.epochs[: self.last_epoch])
        return [micro_batch for step in steps for micro_batch in step.micro_batches]

    @property
    def evaluated(self) -> Iterator[tuple[int, MicroBatch]]:
        """Pairs of the number of times that a micro-batch is evaluated, and the micro-batch."""
        for group, times in ((self.validation, self.num_validations), (self.test, self.num_tests)):
            yield from ((times, micro_batch) for micro_batch in group.micro_batches)

    @property
    def num_validations(self) -> int:
        """How often the validation examples are evaluated."""
        return self.last_epoch + self._validates_start

    @property
    def num_tests(self) -> int:
        """How often the test examples are evaluated."""
        return 1 if self.trains_on_all else 2

    def _steps_of(self, batch: list[Outline], limit: RowLimit) -> list[Group]:
        step = Group(batch, limit)
        if not self._one_micro_batch_each or len(step.micro_batches) == 1:
            return [step]
        return [Group(micro_batch.examples, limit) for micro_batch in step.micro_batches]


def make_schedules(dataset: Dataset, recipe: Recipe, seed: int, lessons: Lessons | None = None) -> list[Schedule]:
    """Returns the schedules of an adaptation: those of its splits, and a last one on all documents.

    There is one split, one for each fold, or none if there are too few documents to judge. A single split is followed
    by a training on all documents if the recipe says so: one epoch from the judged state, or as many epochs as the
    recipe has from an earlier version's state, of which `lessons` has the documents of each training.
    """

    def batches(own: list[Outline], epochs: int) -> list[list[list[Outline]]]:
        return shuffled_batches(
            own + dataset.general_beside(own, 2 * recipe.general),
            recipe.batch_tokens,
            epochs,
            seed,
            batch_rows=recipe.batch_rows,
            min_steps=recipe.min_steps,
        )

    splits, examples, learns_on = dataset.splits(), dataset.outlines.own, lessons is not None
    if lessons is not None:
        splits = [
            replace(split, train=_of(split.train, own.trained), validation=_of(split.validation, own.validated))
            for split, own in zip(splits, lessons.judged, strict=True)
        ]
        examples = _of(examples, lessons.last.trained if lessons.last else ())
    schedules = []
    # The validation documents of a fold are the test documents of another, on which the base model is tested.
    of_base = recipe.method == "lora" and len(splits) > 1
    for split in splits:
        epochs = batches(split.train, epochs=recipe.epochs)
        schedules.append(Schedule(epochs, split.validation, split.test, learns_on=learns_on, knows_start=of_base))
    if len(splits) != 1 or recipe.refits:
        epochs = 1 if len(splits) == 1 and not learns_on else recipe.epochs
        validation = list(chain.from_iterable(split.validation for split in splits))
        last = Schedule(batches(examples, epochs=epochs), test=validation, trains_on_all=True, learns_on=learns_on)
        schedules.append(last)
    return schedules


def _of(examples: Iterable[Outline], documents: Container[int]) -> list[Outline]:
    return [example for example in examples if example.document in documents]


def shuffled_batches(
    examples: list[Outline],
    batch_tokens: int,
    epochs: int,
    seed: int,
    *,
    batch_rows: int | None = None,
    min_steps: int = 1,
) -> list[list[list[Outline]]]:
    """Returns the batches of each epoch: lists of examples of about equal size.

    A batch has about `batch_tokens` loss tokens of documents, or about `batch_rows` active rows if these are fewer
    examples; general text adds no batches. There are at least `min_steps` batches in an epoch, as far as there are
    examples. Each example is in exactly one batch of each epoch; the order depends on `seed` only.
    """
    order = random.Random(seed)
    rows, by_rows = sum(example.num_active_tokens for example in examples), False
    own = sum(example.num_loss_tokens for example in examples if example.document != NO_DOCUMENT)
    steps = max(1, round(own / batch_tokens))
    if batch_rows is not None and rows > steps * batch_rows:
        steps, by_rows = -(-rows // batch_rows), True
    steps = max(steps, min(min_steps, len(examples)))
    return [list(_batches_of(order.sample(examples, len(examples)), steps, by_rows)) for _ in range(epochs)]


def _batches_of(examples: list[Outline], steps: int, by_rows: bool) -> Iterator[list[Outline]]:
    # Batches have about equal sizes, since a small last one would weigh as much as the others in the updates.
    size_of = attrgetter("num_active_tokens" if by_rows else "num_loss_tokens")
    total = sum(map(size_of, examples))
    share = total / steps
    batch, before, filled = [], 0, 0
    for example in examples:
        batch.append(example)
        filled += size_of(example)
        if filled // share > before // share and min(filled - before, total - filled) >= share / 2:
            yield batch
            batch, before = [], filled
    if batch:
        yield batch
