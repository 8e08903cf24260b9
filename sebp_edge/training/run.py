"""Trains and tests one adaptation on a split of the documents, or on folds; then trains it on all of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median_low

from torch import Tensor

from sebp_edge.basics.units import duration, percent
from sebp_edge.errors import AdapterError, NonFiniteLoss
from sebp_edge.events import Evaluated, Notice, Sink, TrainingStarted
from sebp_edge.machine import devices
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import Adaptation, read_state, restore, snapshot
from sebp_edge.models.loading import BaseModel, refuse_unknown_tokens
from sebp_edge.ops import precise_sums
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.examples import Outline
from sebp_edge.texts.general_probe import MAX_RISE
from sebp_edge.texts.schedule import Group, Schedule
from sebp_edge.training.evaluation import HeldOutLoss, evaluate
from sebp_edge.training.gate import Gate, GateResult
from sebp_edge.training.loop import Trainer, TrainingProgress
from sebp_edge.training.quiz import QuizResult
from sebp_edge.training.recovery import RecoveringLearner
from sebp_edge.training.scale_down import scale_down
from sebp_edge.training.scoring import score

# A run that is expected to take longer sends a notice.
SLOW_SECONDS = 180


@dataclass(frozen=True)
class Task:
    """What is trained on, and how.

    Attributes:
        dataset: the examples.
        schedules: those of the splits, and perhaps a last one on all documents (see `make_schedules`).
        recipe, seed: how, and the random seed.
        options: what the training holds in memory at once.
        starts: the folders of the states that the trainings begin in, that of the training on all documents last; if
            empty, they begin with fresh weights.
    """

    dataset: Dataset
    schedules: list[Schedule]
    recipe: Recipe
    seed: int
    options: MemoryOptions
    starts: Sequence[Path] = ()


class TrainingRun:
    """Trains and tests an adaptation; afterwards, or after a stop, `adaptation` is attached in its best state.

    Args:
        attach: attaches the fresh weights that a recipe trains.

    Attributes:
        task: what is trained on, and how.
        adaptation: the trained adaptation; None before the first training.
        progress: the progress of each training, in order.
        judged_states: the states that the gate has judged: one, or one for each fold.
        result: what the gate says of the state that `adaptation` is in after a training or a stop; None if it has not
            judged that state.
        is_hoisted: whether only active rows are computed; None before the first training.
        clock: counts the seconds in which the process can run.
        began: when the run was made, by the clock.
        guard: the memory limit and peak.
    """

    def __init__(
        self,
        base: BaseModel,
        task: Task,
        guard: MemoryGuard,
        on_event: Sink,
        attach: Callable[[BaseModel, Recipe, int], Adaptation],
        clock: Callable[[], float],
    ):
        self.base, self.task, self.guard, self._on_event, self._attach = base, task, guard, on_event, attach
        self._collator = Collator(task.dataset.context_length, base.pad_token_id)
        self._judged = [schedule for schedule in task.schedules if not schedule.trains_on_all]
        self.adaptation: Adaptation | None = None
        self.progress: list[TrainingProgress] = []
        self.result: GateResult | None = None
        self.is_hoisted: bool | None = None
        self.clock, self.began = clock, clock()

    @property
    def judged_states(self) -> list[list[Tensor]]:
        return [progress.best_state for progress in self.progress[: len(self._judged)]]

    def train(self, gate: Gate) -> GateResult:
        """Trains on each split and tests on its test documents; the gate judges; then trains on all documents.

        With folds, each document is tested in a training that has not seen it, and the last training always follows.
        With one split, it follows if the gate keeps the adapter. It has as many epochs as the median of the judged
        states. It is used if the loss on the validation documents, which it has seen, is lower than before.
        Otherwise, after a stop, or if the loss becomes NaN or infinite, a single judged state is used.

        Raises:
            AdapterError: a state to begin in cannot be read, or is not one of this recipe's.
        """
        self._announce_slow_run()
        starts = [read_state(self.base, folder) for folder in self.task.starts]
        self.adaptation = self._attach(self.base, self.task.recipe, self.task.seed)
        with precise_sums(), self._make_learner() as learner:
            self.is_hoisted = learner.is_hoisted
            # With fresh weights, the adaptation computes what the base model does.
            fresh, tests = snapshot(self.adaptation) if len(self.task.schedules) > 1 or starts else [], []
            self._refuse_other_shapes(fresh, starts)
            for number, schedule in enumerate(self._judged):
                if number > 0:
                    learner.start_again(fresh)
                trainer = self._prepare_trainer(learner, schedule, f"fold {number + 1}" if self._has_folds else "train")
                before = self._test(trainer, schedule, is_trained=False)
                general = self._general_text(learner)
                base_loss = evaluate(learner, general).mean if general else math.nan
                if starts:
                    learner.start_again(starts[number])
                trainer.train(schedule)
                if general:
                    self._scale_down(learner, trainer.progress, general, base_loss)
                tests.append((before, self._test(trainer, schedule, is_trained=True)))
            result = gate.judge(*map(HeldOutLoss.merged, zip(*tests, strict=True))) if tests else gate.judge(None, None)
            # A quiz judges after the training.
            if self._has_judged_state and self.task.dataset.quiz is None:
                self.result = result
            if len(self.task.schedules) > len(self._judged) and (result.passed or not self._has_judged_state):
                try:
                    trainer = self._prepare_last(learner, starts[-1] if starts else fresh)
                    trainer.train(self.task.schedules[-1])
                    loss = self._loss_after_last(trainer)
                except BaseException as error:
                    loss = self._undo_last(error)
                result = self.result = self._choose_state(result, loss)
            return result

    def judge_quiz(self, result: GateResult, quiz: QuizResult) -> GateResult:
        """Judges by a quiz instead."""
        self.result = result.with_quiz(quiz)
        return self.result

    @property
    def _has_folds(self) -> bool:
        return len(self._judged) > 1

    @property
    def _has_judged_state(self) -> bool:
        """Whether a single state was judged, which can be used by itself."""
        return len(self._judged) == 1

    @contextmanager
    def in_judged_state(self, result: GateResult) -> Iterator[None]:
        """Context in which the adaptation is in the judged state, with folds that of the first one."""
        if not (result.is_refit and self._judged):
            yield
            return
        final = snapshot(self.adaptation)
        try:
            restore(self.adaptation, self.judged_states[0])
            yield
        finally:
            restore(self.adaptation, final)

    def score(self, adaptation: Adaptation, chosen: list[Outline]) -> HeldOutLoss:
        """Returns the losses of examples with another adaptation, which is attached to the base model now."""
        tokens_of, options = self.task.dataset.all_examples, self.task.options
        examples = [tokens_of[outline.number] for outline in chosen]
        return score(adaptation.model, examples, self._collator, self.base.device, self._on_event, options)

    def detach(self) -> None:
        """Detaches the adaptation and restores the base model."""
        if self.adaptation is not None:
            self.adaptation.detach()
            self.adaptation = None

    def _refuse_other_shapes(self, fresh: list[Tensor], starts: list[list[Tensor]]) -> None:
        shapes = [value.shape for value in fresh]
        if any([value.shape for value in start] != shapes for start in starts):
            raise AdapterError(
                "The active version adapts other modules than this recipe; start over with --fresh (fresh=True)."
            )

    def _make_learner(self) -> RecoveringLearner:
        task, examples = self.task, self.task.dataset.all_examples
        return RecoveringLearner(
            self.adaptation, task.recipe, examples, self._collator, self._on_event, task.options, self.guard
        )

    def _test(self, trainer: Trainer, schedule: Schedule, *, is_trained: bool) -> HeldOutLoss:
        """Returns the test losses of the state that the adaptation is in."""
        losses = evaluate(trainer.learner, schedule.test)
        epoch = trainer.progress.best_epoch if is_trained else 0
        self._on_event(Evaluated(trainer.phase, "test", epoch, losses.mean, is_trained))
        return losses

    def _general_text(self, learner: RecoveringLearner) -> Group | None:
        """Returns the general text that tells how much a trained adapter has forgotten; None if that is not limited."""
        if not self.task.dataset.outlines.probe or self.task.recipe.method != "lora":
            return None
        probe = self.task.dataset.probe
        refuse_unknown_tokens(self.base.model, chain.from_iterable(example.input_ids for example in probe))
        return Group(self.task.dataset.outlines.probe, learner.limit, is_evaluated=True)

    def _scale_down(self, learner: RecoveringLearner, best: TrainingProgress, general: Group, base_loss: float) -> None:
        scale = scale_down(learner, best, general, base_loss)
        if scale < 1:
            because = f"since the loss on general text rose by more than {percent(MAX_RISE)}"
            self._on_event(Notice(f"The adapter was scaled to {percent(scale, 0)}, {because}."))

    def _prepare_last(self, learner: RecoveringLearner, start: list[Tensor]) -> Trainer:
        """Prepares the training on all documents from `start`, with the median number of epochs of those before."""
        schedule = self.task.schedules[-1]
        if self.progress:
            schedule.stop_after(median_low([progress.best_epoch for progress in self.progress]))
            learner.start_again(start)
        return self._prepare_trainer(learner, schedule, "all documents")

    def _loss_after_last(self, trainer: Trainer) -> float | None:
        """Returns the loss on the validation documents after the last training; None if there are none."""
        schedule = self.task.schedules[-1]
        if not self._judged:
            return None
        loss = evaluate(trainer.learner, schedule.test).mean
        self._on_event(Evaluated(trainer.phase, "train", schedule.last_epoch, loss, True))
        return loss

    def _undo_last(self, error: BaseException) -> float:
        """Restores the judged state after an error of the last training; raises it again, unless the loss was NaN."""
        if self._has_judged_state:
            restore(self.adaptation, self.judged_states[0])
            if isinstance(error, NonFiniteLoss):
                return math.nan
        raise error

    def _choose_state(self, result: GateResult, loss: float | None) -> GateResult:
        """Adds the last training's `loss` to the result; restores the judged state if the loss is not lower."""
        judged_loss = None
        if loss is not None:
            judged = self.progress[: len(self._judged)]
            judged_loss = HeldOutLoss.merged([progress.best_validation for progress in judged]).mean
        result = result.with_refit(loss, judged_loss, has_judged_state=self._has_judged_state)
        if not result.is_refit:
            restore(self.adaptation, self.judged_states[0])
        return result

    def _prepare_trainer(self, learner: RecoveringLearner, schedule: Schedule, phase: str) -> Trainer:
        # Before the learner prepares, so that an interruption finds this training's progress, not the last fold's.
        recipe = self.task.recipe.learning_on() if schedule.learns_on else self.task.recipe
        trainer = Trainer(learner, recipe, self._on_event, phase, TrainingProgress(phase), self.clock)
        self.progress.append(trainer.progress)
        self._on_event(TrainingStarted(phase, recipe.epochs, *schedule.num_documents))
        learner.prepare(schedule, self.task.schedules[self.task.schedules.index(schedule) + 1 :])
        return trainer

    def _announce_slow_run(self) -> None:
        seconds = self._expected_seconds()
        if seconds > SLOW_SECONDS:
            self._on_event(
                Notice(
                    f"Training will take about {duration(seconds)} on this {self.base.device.type.upper()}; "
                    "a smaller model, fewer texts or fewer epochs take less time."
                )
            )

    def _expected_seconds(self) -> float:
        """Estimates the time: twice the time of the matrix products at this device's measured rate.

        With P parameters, a token takes 2 P floating-point operations forward, and 2 P backward for a frozen base or
        4 P for a trained one.
        """
        passes = 4 if self.task.recipe.method == "lora" else 6
        tokens = sum(schedule.num_tokens for schedule in self.task.schedules)
        operations = passes * self.base.num_parameters * tokens
        return 2 * operations / devices.matmul_rate(self.base.device, self.base.dtype)
