"""What a training computes, counted from its schedule: the sizes of its micro-batches, and how many tokens' worth."""

from collections.abc import Iterable
from dataclasses import dataclass

from sebp_edge.rows.buckets import Bucket, choose_buckets
from sebp_edge.texts.schedule import Schedule

# What a micro-batch on a CPU takes beside its tokens, in tokens: 45 ms of 0.84 ms for a token, the bundled model on one
# core.
TOKENS_PER_STEP_CPU = 50


@dataclass(frozen=True)
class Work:
    """What the trainings of an adaptation compute.

    Attributes:
        trained, evaluated: sizes of micro-batches, each once, as graphs are filled up to. Of those without graphs only
            sizes that no other one holds, since the others take less memory.
        micro_batches: how many have gradients.
        trained_tokens, evaluated_tokens: the cost of all micro-batches, in tokens.
    """

    trained: list[Bucket]
    evaluated: list[Bucket]
    micro_batches: int
    trained_tokens: float
    evaluated_tokens: float

    @classmethod
    def of(cls, schedules: Iterable[Schedule], *, on_gpu: bool, in_graphs: bool) -> "Work":
        """The work of schedules that are laid out."""
        trained: list[Bucket] = []
        evaluated: list[Bucket] = []
        evaluated_tokens = 0.0
        for schedule in schedules:
            needed = [_needed(micro_batch.sizes, in_graphs) for micro_batch in schedule.trained]
            trained += _filled(needed) if in_graphs else needed
            for times, micro_batch in schedule.evaluated:
                evaluated.append(_needed(micro_batch.sizes, in_graphs))
                evaluated_tokens += times * _cost(evaluated[-1], on_gpu)
        return cls(
            trained=_largest(trained, in_graphs),
            evaluated=_largest(evaluated, in_graphs),
            micro_batches=len(trained),
            trained_tokens=sum(_cost(sizes, on_gpu) for sizes in trained),
            evaluated_tokens=evaluated_tokens,
        )


def _needed(sizes: Bucket, in_graphs: bool) -> Bucket:
    return Bucket.holding(*sizes) if in_graphs else sizes


def _filled(needed: list[Bucket]) -> list[Bucket]:
    """The bucket that each is filled up to."""
    buckets = choose_buckets(needed)
    return [next(bucket for bucket in buckets if bucket.holds(own)) for own in needed]


def _largest(sizes: list[Bucket], in_graphs: bool) -> list[Bucket]:
    found: list[Bucket] = []
    # Before each one come all that may hold it.
    for own in sorted(set(sizes), reverse=True):
        if in_graphs or not any(other.holds(own) for other in found):
            found.append(own)
    return sorted(found)


def _cost(sizes: Bucket, on_gpu: bool) -> float:
    """In tokens; a bucket's cost counts what a step costs whatever its tokens."""
    return sizes.cost if on_gpu else sizes.tokens + TOKENS_PER_STEP_CPU
