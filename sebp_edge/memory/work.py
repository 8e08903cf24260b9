"""What a training computes, known before anything is loaded: its micro-batches' sizes, and how many tokens' worth."""

from dataclasses import dataclass
from itertools import chain

from sebp_edge.memory.setup import TrainingSetup
from sebp_edge.recipe import Recipe
from sebp_edge.rows.buckets import Bucket, choose_buckets
from sebp_edge.texts.batches import bucket_for, micro_batches
from sebp_edge.texts.examples import Example
from sebp_edge.texts.splits import Split

# What a micro-batch on a CPU takes beside its tokens, in tokens: 45 ms of 0.84 ms for a token, the bundled model on one
# core.
TOKENS_PER_STEP_CPU = 50


@dataclass(frozen=True)
class Work:
    """What a training computes: the sizes of its micro-batches that may be the largest, each once, and how many tokens'
    worth there are in all.

    `micro_batches` counts those with gradients. On a GPU they are filled up to buckets, whose costs count what a step
    costs whatever its tokens.
    """

    trained: list[Bucket]
    evaluated: list[Bucket]
    micro_batches: int
    trained_tokens: float
    evaluated_tokens: float

    @classmethod
    def of(cls, recipe: Recipe, splits: list[Split], steps: list[list[list[Example]]], sizes: "Sizes") -> "Work":
        """Of the steps of each split's training, and of what is held out of it."""
        trained: list[Bucket] = []
        evaluated: list[Bucket] = []
        evaluated_tokens = 0.0
        for split, of_split in zip(splits, steps, strict=True):
            trained += sizes.filled(list(chain.from_iterable(map(sizes.of, of_split))))
            for part, times in ((split.select, recipe.epochs + 1), (split.judge, 2)):
                found = sizes.of(part)
                evaluated += found
                evaluated_tokens += times * sum(map(sizes.cost, found))
        return cls(
            trained=sizes.largest(trained),
            evaluated=sizes.largest(evaluated),
            micro_batches=len(trained),
            trained_tokens=sum(map(sizes.cost, trained)),
            evaluated_tokens=evaluated_tokens,
        )


class Sizes:
    """The sizes of a training's micro-batches, as the training will cut them."""

    def __init__(self, machinery: TrainingSetup, context_length: int, max_rows: int):
        self._hoisted, self._on_gpu = machinery.is_hoisted, machinery.on_gpu
        self._in_graphs = self._on_gpu and self._hoisted
        self._context_length, self._max_rows = context_length, max_rows

    def of(self, examples: list[Example]) -> list[Bucket]:
        return [self._size(group) for group in micro_batches(examples, self._max_rows, self._num_rows)]

    def filled(self, sizes: list[Bucket]) -> list[Bucket]:
        """Each in the bucket that it is filled up to."""
        if not self._in_graphs:
            return sizes
        buckets = choose_buckets(sizes)
        return [next(bucket for bucket in buckets if bucket.holds(own)) for own in sizes]

    def largest(self, sizes: list[Bucket]) -> list[Bucket]:
        """Each once; of those without graphs only what no other one holds, since the others take less memory."""
        found: list[Bucket] = []
        # Before each one come all that may hold it.
        for own in sorted(set(sizes), reverse=True):
            if self._in_graphs or not any(other.holds(own) for other in found):
                found.append(own)
        return sorted(found)

    def cost(self, sizes: Bucket) -> float:
        return sizes.cost if self._on_gpu else sizes.tokens + TOKENS_PER_STEP_CPU

    def _num_rows(self, example: Example) -> int:
        return example.num_active_tokens if self._hoisted else self._context_length

    def _size(self, group: list[Example]) -> Bucket:
        if self._in_graphs:
            return bucket_for(group)
        rows, losses = sum(map(self._num_rows, group)), sum(example.num_loss_tokens for example in group)
        return Bucket(rows, len(group), max(map(self._num_rows, group)), losses)
