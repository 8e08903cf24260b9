"""Runs one training: learning rates, steps, evaluations, early stopping, the best state."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch

from sebp_edge.engine.models.adaptation import restore, snapshot
from sebp_edge.engine.sparse.rows.schedule import Group, Schedule
from sebp_edge.engine.training.evaluation import BaseLosses, HeldOutLoss, evaluate
from sebp_edge.engine.training.learner import Outcome
from sebp_edge.engine.training.recovery import LearnerState, RecoveringLearner
from sebp_edge.errors import NonFiniteLoss
from sebp_edge.events import Evaluated, Sink, StepDone
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Outline


@dataclass
class TrainingProgress:
    """Progress of a training, updated as it runs."""

    phase: str = ""  # the name of the training in events
    # Updates done and planned.
    steps: int = 0
    total_steps: int = 0
    tokens: int = 0  # tokens trained on, without padding; repeats count
    seconds: float = 0.0  # time spent on steps, without evaluations
    best_epoch: int = 0  # epoch of the best state; 0 is the state before training
    best_loss: float = math.inf  # held-out loss of that state, in nats per token; NaN without validation examples
    best_validation: HeldOutLoss | None = None  # the validation losses of that state; None without validation examples
    # The trained parameters in that state, on the CPU.
    best_state: list[torch.Tensor] = field(default_factory=list, repr=False)
    losses: list[float] = field(default_factory=list, repr=False)  # the loss of each step, in nats per loss token
    # The number of these losses before each evaluation, and the validation loss.
    validations: list[tuple[int, float]] = field(default_factory=list)
    epoch: int = 0  # how many of the schedule's epochs are over, with the evaluation after them
    epoch_steps: int = 0
    is_over: bool = False  # whether the training is over; the best state does not change any more
    # The test losses before the training and after it; None until they are known.
    before: HeldOutLoss | None = None
    after: HeldOutLoss | None = None

    @property
    def is_running(self) -> bool:
        """Whether some of its steps are done, but not all."""
        return self.steps > 0 and not self.is_over


class _PendingStep(NamedTuple):
    """A step whose outcome has not been read yet."""

    epoch: int
    step: Group
    outcome: Outcome
    learning_rate: float


@dataclass(frozen=True)
class Trainer:
    """Trains one adaptation and leaves it in its best state."""

    learner: RecoveringLearner
    recipe: Recipe
    on_event: Sink
    phase: str
    # The progress of the training, valid after an interruption too; one with steps is gone on with.
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    clock: Callable[[], float] = time.perf_counter
    # Of the state before the first step, if that is a fresh adapter's.
    base_losses: BaseLosses = field(default_factory=BaseLosses)
    # The steps whose outcome has not been read yet; None for one that runs.
    pending: deque[_PendingStep | None] = field(default_factory=deque)
    # What the learner goes on from, while it is in another state; empty otherwise.
    set_aside: list[torch.Tensor] = field(default_factory=list)

    @property
    def learner_state(self) -> LearnerState:
        """What the learner goes on from; see `RecoveringLearner.state`."""
        state = self.learner.state
        return state._replace(tensors=self.set_aside) if self.set_aside else state

    def train(self, schedule: Schedule) -> TrainingProgress:
        """Runs the steps of a schedule that the learner is prepared for, and evaluates between its epochs.

        The best state is the one with the lowest validation loss, or the last one if there are no validation examples.
        The state before the first step of a fresh adapter is evaluated after the first epoch, so that the first step
        comes soon.
        After an interruption, the adaptation is in the best state so far, or in its current state if no epoch has
        improved on the start.
        """
        progress = self.progress
        epochs = schedule.epochs[: schedule.last_epoch]
        # Without documents that are gone, an epoch may have fewer steps than are done of it.
        progress.epoch_steps = min(progress.epoch_steps, sum(map(len, epochs[progress.epoch : progress.epoch + 1])))
        done = sum(map(len, epochs[: progress.epoch])) + progress.epoch_steps
        progress.total_steps = progress.steps + sum(map(len, epochs)) - done
        try:
            is_late = self.recipe.method == "lora"
            if (schedule.learns_on or is_late) and not done:
                progress.best_state = snapshot(self.learner.adaptation)
            elif not done:
                self._evaluate(schedule, 0)
            while progress.epoch < len(epochs) and progress.epoch - progress.best_epoch < self.recipe.patience:
                self._train_epoch(schedule)
                if is_late and not (schedule.learns_on or progress.best_epoch or progress.best_validation):
                    self._evaluate_start(schedule.validation)
                self._evaluate(schedule, progress.epoch + 1)
        except BaseException as stop:
            # Before the first improvement, the current state is worth keeping, unless the training diverged.
            if progress.best_epoch > 0 or isinstance(stop, NonFiniteLoss):
                restore(self.learner.adaptation, progress.best_state)
            raise
        progress.is_over = True
        restore(self.learner.adaptation, progress.best_state)
        return progress

    def _train_epoch(self, schedule: Schedule) -> None:
        """Trains the next epoch; a GPU's next step is launched before the outcome of the one before is read."""
        progress, pending = self.progress, self.pending
        begin, before = self.clock(), progress.seconds
        done = sum(map(len, schedule.epochs[: progress.epoch])) + progress.epoch_steps
        rates = islice(learning_rates(self.recipe, schedule.num_steps), done, None)
        epoch, steps = progress.epoch + 1, schedule.epochs[progress.epoch][progress.epoch_steps :]
        for step, rate in zip(steps, rates, strict=False):
            if not self.learner.can_be_left:
                pending.append(None)  # nothing is to be saved during the step
            outcome = self.learner.step(step, rate)
            if not self.learner.can_be_left:
                pending.pop()
            pending.append(_PendingStep(epoch, step, outcome, rate))
            while len(pending) > (0 if self.learner.breaks.is_due() else self.learner.steps_ahead):
                self._finish_step(pending.popleft(), before + self.clock() - begin)
        while pending:
            self._finish_step(pending.popleft(), before + self.clock() - begin)

    def _finish_step(self, finished: _PendingStep, seconds: float) -> None:
        """Reads a step's outcome, counts the step and reports it."""
        progress, loss, grad_norm = self.progress, float(finished.outcome.loss), float(finished.outcome.grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteLoss(
                f"At step {progress.steps + 1}, the loss is {loss} and the gradient norm {grad_norm}; "
                f"{self._advice(finished.step.examples)}"
            )
        progress.steps += 1
        progress.epoch_steps += 1
        progress.losses.append(loss)
        progress.tokens += finished.step.num_tokens
        progress.seconds = seconds
        self.on_event(
            StepDone(
                phase=self.phase,
                step=progress.steps,
                steps=progress.total_steps,
                epoch=finished.epoch,
                loss=loss,
                learning_rate=finished.learning_rate,
                grad_norm=grad_norm,
                tokens=progress.tokens,
                tokens_per_second=progress.tokens / progress.seconds,
                seconds_left=progress.seconds / progress.steps * (progress.total_steps - progress.steps),
            )
        )

    def _advice(self, examples: list[Outline]) -> str:
        """Returns advice for a loss or gradient that is not finite."""
        embedding_VD = self.learner.adaptation.model.get_input_embeddings().weight
        # The first token attends to itself only, so a row of zeros stays zero, and each norm multiplies its gradient
        # by 1 / sqrt(eps).
        tokens_of = self.learner.row_losses.examples
        first = sorted({tokens_of[example.number].input_ids[0] for example in examples})
        first = torch.tensor(first, device=embedding_VD.device)
        without = first[~embedding_VD[first].any(dim=1)].tolist()
        if without:
            return f"the embedding of token {without[0]} is zero; use the tokenizer that the model was trained with."
        return "lower the learning rate."

    def _evaluate_start(self, validation: Group) -> None:
        """Evaluates the state before the first step, which is the best state until then."""
        if not validation.examples:
            return
        if not self.base_losses.knows(validation):
            self._compute_base_losses(validation)
        progress, losses = self.progress, self.base_losses.of(validation)
        loss = losses.mean
        if best := loss < progress.best_loss:
            progress.best_loss, progress.best_validation = loss, losses
        progress.validations.append((0, loss))
        self.on_event(Evaluated(self.phase, "validation", 0, loss, best))

    def _compute_base_losses(self, validation: Group) -> None:
        tensors = self.learner.state.tensors
        self.set_aside.extend(tensor.to("cpu", copy=True) for tensor in tensors)
        restore(self.learner.adaptation, self.progress.best_state)
        try:
            self.base_losses.compute(self.learner, validation)
        finally:
            for tensor, value in zip(tensors, self.set_aside, strict=True):
                tensor.copy_(value)
            self.set_aside.clear()

    def _evaluate(self, schedule: Schedule, done: int) -> None:
        """Evaluates an epoch; keeps its state if it is the best so far, or if there are no validation examples.

        Args:
            done: how many of the schedule's epochs are over.
        """
        progress, validation = self.progress, schedule.validation
        losses = evaluate(self.learner, validation) if validation.examples else None
        loss = losses.mean if losses else math.nan
        best = not losses or loss < progress.best_loss
        if best:
            progress.best_epoch, progress.best_loss, progress.best_validation = done, loss, losses
            progress.best_state = snapshot(self.learner.adaptation)
        if losses:
            progress.validations.append((len(progress.losses), loss))
        progress.epoch, progress.epoch_steps = done, 0
        if losses:
            self.on_event(Evaluated(self.phase, "validation", done, loss, best))


def learning_rates(recipe: Recipe, total_steps: int) -> Iterator[float]:
    """Yields each step's learning rate: linear warm-up, then cosine decay to zero (Loshchilov and Hutter 2017)."""
    peak, warmup = recipe.peak_rate, max(1, round(recipe.warmup_ratio * total_steps))
    for step in range(total_steps):
        if step < warmup:
            factor = (step + 1) / warmup
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))
        yield peak * factor
