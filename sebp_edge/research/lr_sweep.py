"""Runs a learning-rate range test (Smith 2017): one short training in which the rate grows with every step."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sebp_edge.events import Sink, StepDone, TrainingStarted
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import attach
from sebp_edge.models.loading import BaseModel
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.examples import Outline
from sebp_edge.texts.schedule import Schedule, shuffled_batches
from sebp_edge.training.recovery import RecoveringLearner

PHASE = "range test"
# The weight of the earlier steps in the smoothed loss.
MEMORY = 0.9
# The test stops if the smoothed loss is this many times its lowest value.
DIVERGED = 1.5


@dataclass(frozen=True)
class RangeStep:
    """One step of a range test.

    Attributes:
        learning_rate: of the step's update.
        loss: of its batch before the update, in nats per token.
        smoothed: the exponential moving average of the losses so far, without its bias towards zero.
    """

    learning_rate: float
    loss: float
    smoothed: float


def run_range_test(
    base: BaseModel,
    dataset: Dataset,
    recipe: Recipe,
    rates: list[float],
    seed: int,
    on_event: Sink,
    options: MemoryOptions,
    guard: MemoryGuard,
) -> list[RangeStep]:
    """Trains one step at each of the rates, until the loss diverges; the base model is unchanged afterwards.

    Returns:
        The steps with a finite loss; fewer than rates if the loss diverged.
    """
    adaptation = attach(base, recipe, seed)
    try:
        collator = Collator(dataset.context_length, base.pad_token_id)
        with RecoveringLearner(adaptation, recipe, dataset.all_examples, collator, on_event, options, guard) as learner:
            schedule = _schedule(dataset, recipe, len(rates), seed)
            on_event(TrainingStarted(PHASE, 1, *schedule.num_documents))
            learner.prepare(schedule)
            return list(_steps(learner, schedule, rates, on_event))
    finally:
        adaptation.detach()


def _schedule(dataset: Dataset, recipe: Recipe, num_steps: int, seed: int) -> Schedule:
    """A schedule of one epoch with at least this many batches of all examples, in the recipe's size."""

    def batches(epochs: int) -> list[list[list[Outline]]]:
        return shuffled_batches(
            dataset.outlines.trained,
            recipe.batch_tokens,
            epochs,
            seed,
            batch_rows=recipe.batch_rows,
            min_steps=recipe.min_steps,
        )

    (epoch,) = batches(1)
    epochs = batches(-(-num_steps // len(epoch)))
    return Schedule([[batch for epoch in epochs for batch in epoch][:num_steps]])


def _steps(learner: RecoveringLearner, schedule: Schedule, rates: list[float], on_event: Sink) -> Iterator[RangeStep]:
    average, lowest, tokens, start = 0.0, math.inf, 0, time.perf_counter()
    # A learner that cannot accumulate has more steps than batches.
    for number, (step, rate) in enumerate(zip(schedule.epochs[0], rates, strict=False), start=1):
        outcome = learner.step(step, rate)
        loss, grad_norm = float(outcome.loss), float(outcome.grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return
        average = MEMORY * average + (1 - MEMORY) * loss
        smoothed = average / (1 - MEMORY**number)
        tokens += step.num_tokens
        seconds = time.perf_counter() - start
        left = seconds / number * (len(rates) - number)
        on_event(StepDone(PHASE, number, len(rates), 1, loss, rate, grad_norm, tokens, tokens / seconds, left))
        yield RangeStep(rate, loss, smoothed)
        lowest = min(lowest, smoothed)
        if smoothed > DIVERGED * lowest:
            return
