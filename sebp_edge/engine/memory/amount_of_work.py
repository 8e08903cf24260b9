"""Counts the work of a training from its schedule: the sizes of its micro-batches, and their cost in tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sebp_edge.engine.sparse.rows.beginnings import shared_beginnings, sizes_when_shared
from sebp_edge.engine.sparse.rows.buckets import Bucket, choose_buckets
from sebp_edge.engine.sparse.rows.schedule import MicroBatch, Schedule
from sebp_edge.values.example import Example

# Fixed cost of a micro-batch on a CPU, in tokens: 45 ms at 0.84 ms per token, for the bundled model on one core.
TOKENS_PER_STEP_CPU = 50


@dataclass(frozen=True)
class AmountOfWork:
    """The work of all trainings of an adaptation."""

    # The distinct sizes of micro-batches; with graphs, those of their buckets. Without graphs, sizes that fit into
    # another one are left out, since they take less memory.
    trained: list[Bucket]
    evaluated: list[Bucket]
    # The number of micro-batches with gradients, and without.
    micro_batches: int
    evaluations: int
    # The cost of all micro-batches with and without gradients, in tokens.
    trained_tokens: float
    evaluated_tokens: float
    repeated: float  # the part of the rows with gradients that sharing what sequences begin with saves, or would save

    @classmethod
    def of(
        cls,
        schedules: Iterable[Schedule],
        examples: Sequence[Example],
        *,
        on_gpu: bool,
        has_graphs: bool,
        shares_prefixes: bool = False,
    ) -> "AmountOfWork":
        """Counts the work of schedules, which must be laid out; `examples` have the tokens."""

        def size_of(micro_batch: MicroBatch) -> tuple[Bucket, int, int]:
            """The sizes that take memory, how many of their tokens take no time, and how many rows are repeated."""
            sizes = micro_batch.sizes
            shared = shared_sizes(micro_batch, examples, on_gpu=on_gpu)
            num_repeated = sizes.tokens - shared.tokens
            if has_graphs:
                return (shared if shares_prefixes else sizes).on_grid, 0, num_repeated
            # Torch copies the keys of a prefix for each sequence that continues it, so this shares no memory.
            return sizes, num_repeated if shares_prefixes else 0, num_repeated

        needed: list[Bucket] = []
        evaluated: list[Bucket] = []
        rows = shared_tokens = shared_evaluated = repeated = 0
        for schedule in schedules:
            for micro_batch in schedule.trained:
                sizes, num_shared, num_repeated = size_of(micro_batch)
                needed.append(sizes)
                rows += micro_batch.sizes.tokens
                shared_tokens += num_shared
                repeated += num_repeated
            for times, micro_batch in schedule.evaluated:
                sizes, num_shared, _ = size_of(micro_batch)
                evaluated += times * [sizes]
                shared_evaluated += times * num_shared
        # All trainings share their graphs.
        trained, evaluated = (_in_buckets(each) if has_graphs else each for each in (needed, evaluated))
        return cls(
            trained=_largest(trained, has_graphs),
            evaluated=_largest(evaluated, has_graphs),
            micro_batches=len(trained),
            evaluations=len(evaluated),
            trained_tokens=sum(_cost(sizes, on_gpu) for sizes in trained) - shared_tokens,
            evaluated_tokens=sum(_cost(sizes, on_gpu) for sizes in evaluated) - shared_evaluated,
            repeated=repeated / rows if rows else 0.0,
        )


def shared_sizes(micro_batch: MicroBatch, examples: Sequence[Example], *, on_gpu: bool) -> Bucket:
    """Returns the sizes of a micro-batch in which what sequences begin with in common is computed once."""
    found = [examples[outline.number] for outline in micro_batch.examples]
    lengths = [example.num_active_tokens for example in found]
    prompts = [example.input_ids[: example.num_tokens_before_loss + 1] for example in found]
    return sizes_when_shared(micro_batch.sizes, shared_beginnings(prompts, lengths, on_gpu=on_gpu), lengths)


def _in_buckets(sizes: list[Bucket]) -> list[Bucket]:
    buckets = choose_buckets(sizes)
    return [next(each for each in buckets if each.holds(own)) for own in sizes]


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
