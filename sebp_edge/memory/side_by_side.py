"""Tells which trainings pay side by side, in one pass of the base model, and how large their passes are."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest

from sebp_edge.sparse.rows.buckets import CAPTURE_COST, STEP_COST, Bucket
from sebp_edge.texts.schedule import Group, Schedule

# More rows of all trainings together hardly gain from sharing the fixed cost of a pass.
MAX_ROWS = 2048
# The graphs of two updates, and of the passes and evaluations of all trainings.
MORE_GRAPHS = 4


def steps_together(schedules: Sequence[Schedule], done: Sequence[int]) -> Iterator[list[Group]]:
    """Yields the steps that run at once if no training ends early, from the number of steps that each has done.

    Args:
        schedules: laid out.
    """
    own = [
        islice(chain.from_iterable(schedule.epochs[: schedule.last_epoch]), number, None)
        for schedule, number in zip(schedules, done, strict=True)
    ]
    yield from ([step for step in steps if step is not None] for steps in zip_longest(*own))


def pays(schedules: Sequence[Schedule], done: Sequence[int]) -> bool:
    """Whether schedules that are laid out take less time side by side as captured steps on a GPU.

    They share the fixed cost of a pass, and must make up for the graphs that are captured in addition.
    """
    together = list(steps_together(schedules, done))
    if any(len(step.micro_batches) > 1 for steps in together for step in steps):
        return False
    saved = STEP_COST * sum(len(steps) - 1 for steps in together)
    return saved > MORE_GRAPHS * CAPTURE_COST and max(map(num_rows, together)) <= MAX_ROWS


def num_rows(steps: list[Group]) -> int:
    """Returns the rows of steps that run at once."""
    return sum(micro_batch.sizes.tokens for step in steps for micro_batch in step.micro_batches)


def sizes_beside(sizes: Iterable[Bucket]) -> Bucket:
    """Returns the sizes of several batches as one."""
    tokens, sequences, longest, loss_rows = zip(*sizes, strict=True)
    return Bucket(sum(tokens), sum(sequences), max(longest), sum(loss_rows))
