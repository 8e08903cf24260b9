"""Counts the work of a training from its schedule: the sizes of its micro-batches, and their cost in tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sebp_edge.sparse.rows.beginnings import num_shared_tokens
from sebp_edge.sparse.rows.buckets import Bucket, choose_buckets
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import MicroBatch, Schedule

# Fixed cost of a micro-batch on a CPU, in tokens: 45 ms at 0.84 ms per token, for the bundled model on one core.
TOKENS_PER_STEP_CPU = 50


@dataclass(frozen=True)
class Work:
    """The work of all trainings of an adaptation.

    Attributes:
        trained, evaluated: the distinct sizes of micro-batches; with graphs, those of their buckets. Without graphs,
            sizes that fit into another one are left out, since they take less memory.
        micro_batches: the number of micro-batches with gradients.
        trained_tokens, evaluated_tokens: the cost of all micro-batches with and without gradients, in tokens.
    """

    trained: list[Bucket]
    evaluated: list[Bucket]
    micro_batches: int
    trained_tokens: float
    evaluated_tokens: float

    @classmethod
    def of(
        cls,
        schedules: Iterable[Schedule],
        examples: Sequence[Example],
        *,
        on_gpu: bool,
        has_graphs: bool,
        shares_prefixes: bool = False,
    ) -> "Work":
        """Counts the work of schedules, which must be laid out; `examples` have the tokens."""
        needed: list[Bucket] = []
        evaluated: list[Bucket] = []
        shared_tokens, evaluated_tokens = 0, 0.0
        for schedule in schedules:
            for micro_batch in schedule.trained:
                needed.append(_size_of(micro_batch.sizes, has_graphs))
                shared_tokens += shares_prefixes and _num_shared_tokens(micro_batch, examples)
            for times, micro_batch in schedule.evaluated:
                evaluated.append(_size_of(micro_batch.sizes, has_graphs))
                shared = shares_prefixes and _num_shared_tokens(micro_batch, examples)
                evaluated_tokens += times * (_cost(evaluated[-1], on_gpu) - shared)
        # All trainings share their graphs.
        buckets = choose_buckets(needed) if has_graphs else []
        trained = [next(each for each in buckets if each.holds(own)) for own in needed] if has_graphs else needed
        return cls(
            trained=_largest(trained, has_graphs),
            evaluated=_largest(evaluated, has_graphs),
            micro_batches=len(trained),
            trained_tokens=sum(_cost(sizes, on_gpu) for sizes in trained) - shared_tokens,
            evaluated_tokens=evaluated_tokens,
        )


def _size_of(sizes: Bucket, has_graphs: bool) -> Bucket:
    return Bucket.holding(*sizes) if has_graphs else sizes


def _num_shared_tokens(micro_batch: MicroBatch, examples: Sequence[Example]) -> int:
    found = (examples[outline.number] for outline in micro_batch.examples)
    return num_shared_tokens([example.input_ids[: example.num_tokens_before_loss] for example in found])


def _largest(sizes: list[Bucket], has_graphs: bool) -> list[Bucket]:
    found: list[Bucket] = []
    # In descending order, all sizes that may hold another come before it.
    for own in sorted(set(sizes), reverse=True):
        if has_graphs or not any(other.holds(own) for other in found):
            found.append(own)
    return sorted(found)


def _cost(sizes: Bucket, on_gpu: bool) -> float:
    """Returns the cost of a micro-batch in tokens; on a GPU, a bucket's cost includes the fixed cost of a step."""
    return sizes.cost if on_gpu else sizes.tokens + TOKENS_PER_STEP_CPU
