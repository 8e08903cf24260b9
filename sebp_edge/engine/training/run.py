"""Trains and tests one adaptation on a split of the documents, or on folds; then trains it on all of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median_low

from torch import Tensor

from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation, attach, read_state, restore, snapshot
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.lora import refused_layers
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.engine.training.checkpoint import RunState
from sebp_edge.engine.training.evaluation import BaseLosses, HeldOutLoss, evaluate
from sebp_edge.engine.training.gate import Gate, GateResult
from sebp_edge.engine.training.loop import Trainer, TrainingProgress
from sebp_edge.engine.training.quiz import QuizResult
from sebp_edge.engine.training.recovery import Breaks, RecoveringLearner
from sebp_edge.engine.training.scoring import scoring
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import AdapterError, ModelError, NonFiniteLoss
from sebp_edge.events import Evaluated, Notice, Sink, TrainingStarted
from sebp_edge.ops import precise_sums
from sebp_edge.recipe import Recipe
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Outline


@dataclass(frozen=True)
class Task:
    """What is trained on, and how."""

    dataset: Dataset
    schedules: list[Schedule]  # those of the splits, and perhaps a last one on all documents (see `make_schedules`)
    recipe: Recipe
    seed: int
    options: MemoryOptions
    # The folders of the states that the trainings begin in, that of the training on all documents last; if empty, they
    # begin with fresh weights.
    starts: Sequence[Path] = ()


class TrainingRun:
    """Trains and tests an adaptation; afterwards, or after a stop, `adaptation` is attached in its best state.

    Args:
        resumed: how far an earlier process has come with the same task; None to begin.

    Attributes:
        adaptation: the trained adaptation; None before the first training.
        progress: the progress of each training, in order.
        judged_states: the states that the gate has judged: one, or one for each fold.
        result: what the gate says of the state that `adaptation` is in after a training or a stop; None if it has not
            judged that state.
        is_hoisted: whether only active rows are computed; None before the first training.
        clock: counts the seconds in which the process can run.
        began: when the run was made, by the clock.
    """

    def __init__(
        self,
        base: BaseModel,
        task: Task,
        guard: MemoryGuard,
        on_event: Sink,
        clock: Callable[[], float],
        resumed: RunState | None = None,
        breaks: Breaks | None = None,
    ):
        self.base, self.task, self.guard, self._on_event = base, task, guard, on_event
        self._collator = Collator(task.dataset.context_length, base.pad_token_id)
        self._words = cache(partial(_word_reader, base, task))  # made when a test needs it
        self._judged = [schedule for schedule in task.schedules if not schedule.trains_on_all]
        self.adaptation: Adaptation | None = None
        self.progress: list[TrainingProgress] = []
        self.result: GateResult | None = None
        self.is_hoisted: bool | None = None
        self.clock, self.began = clock, clock() - (resumed.seconds if resumed else 0)
        self._breaks = breaks or Breaks()
        self._resumed = resumed  # until the last of its trainings is where it was
        self._trainer: Trainer | None = None

    @property
    def is_between_steps(self) -> bool:
        """Whether the outcome of each step is read, and none is running that has changed anything."""
        return self._trainer is None or not self._trainer.pending

    @property
    def state(self) -> RunState | None:
        """How far it is, between two steps; None until it is as far as the run that it goes on with."""
        if self._resumed is not None:
            return None
        trainer = self._trainer
        learner = trainer.learner_state if trainer is not None and trainer.progress.is_running else None
        return RunState(self.clock() - self.began, list(self.progress), learner)

    @property
    def judged_states(self) -> list[list[Tensor]]:
        return [progress.best_state for progress in self.progress[: len(self._judged)]]

    def train(self, gate: Gate, known: HeldOutLoss | None = None) -> GateResult:
        """Trains on each split and tests on its test documents; the gate judges; then trains on all documents.

        With folds, each document is tested in a training that has not seen it, and the last training follows, with as
        many epochs as the median of the judged states, unless that is none. With one split, it follows if the gate
        keeps the adapter: it begins in the judged state and has one epoch. It is used if the loss on the validation
        documents, which it has seen, is lower than before. Otherwise, after a stop, or if the loss becomes NaN or
        infinite, a single judged state is used.

        Args:
            known: test losses of the base model that need not be computed.
        """
        self._base_losses = BaseLosses(self._judged, known)
        starts = [read_state(self.base, folder) for folder in self.task.starts]
        self.adaptation = attach(self.base, self.task.recipe, self.task.seed)
        if self.task.recipe.method == "lora" and (refused := refused_layers(self.base.model)):
            self._on_event(Notice(f"All linear layers but {', '.join(refused)} learn: PEFT takes no adapter there."))
        self._breaks.check()  # attaching takes a second on a CPU, and so does the learner's trial
        with precise_sums(), self._make_learner() as learner:
            self.is_hoisted = learner.row_losses.hoisted is not None
            # With fresh weights, the adaptation computes what the base model does.
            is_needed = len(self.task.schedules) > 1 or starts or self.task.recipe.method == "lora"
            fresh = snapshot(self.adaptation) if is_needed else []
            self._refuse_other_shapes(fresh, starts)
            before, after = [], []
            for number in range(len(self._judged)):
                progress = self._take_over(number) or self._train_and_test(learner, number, fresh, starts)
                before.append(progress.before)
                after.append(progress.after)
            merged = HeldOutLoss.merged
            result = gate.judge(merged(before), merged(after)) if after else gate.judge(None, None)
            # A quiz judges after the training.
            if self._has_judged_state and self.task.dataset.quiz is None:
                self.result = result
            if len(self.task.schedules) > len(self._judged) and (result.passed or not self._has_judged_state):
                judged = self.judged_states[0] if self._has_judged_state else fresh
                start = starts[-1] if starts else judged
                if self._judged and not result.passed and not self._median_epoch:
                    restore(self.adaptation, start)  # nothing was learnt that would be learnt from all documents
                    self.result = result
                    return result
                try:
                    loss = self._train_last(learner, start)
                except BaseException as error:
                    loss = self._undo_last(error)
                result = self.result = self._choose_state(result, loss)
            return result

    def _take_over(self, number: int) -> TrainingProgress | None:
        """Takes over a training that an earlier process has ended and tested, with its best state; None without one."""
        found = self._progress_before(number)
        if found is None or found.after is None:
            return None
        self.progress.append(found)
        restore(self.adaptation, found.best_state)
        self._forget_resumed()
        return found

    def _progress_before(self, number: int) -> TrainingProgress | None:
        """Returns how far an earlier process has come with a training."""
        known = self._resumed.progress if self._resumed else []
        return known[number] if number < len(known) else None

    def _forget_resumed(self) -> None:
        if self._resumed is not None and len(self.progress) >= len(self._resumed.progress):
            self._resumed = None

    def _train_and_test(
        self, learner: RecoveringLearner, number: int, fresh: list[Tensor], starts: list[list[Tensor]]
    ) -> TrainingProgress:
        """Trains on a split from its start, or from fresh weights; tests the base model and the trained state.

        Both are tested after the training, so that the first step comes soon. Only a full fine-tuning without another
        one after it tests the base model before: it keeps no copy of these weights.
        """
        if number > 0:
            learner.plain.start_again(fresh)
        schedule = self._judged[number]
        trainer = self._prepare_trainer(learner, number)
        progress = trainer.progress
        if not fresh:
            self._test_base(trainer, schedule, fresh)
        if not progress.is_over:
            if starts and not progress.steps:
                learner.plain.start_again(starts[number])
            trainer.train(schedule)
        if fresh:
            self._test_base(trainer, schedule, fresh)
        progress.after = evaluate(learner, schedule.test, reads_words=True)
        self._on_event(Evaluated(trainer.phase, "test", progress.best_epoch, progress.after.mean, True))
        return progress

    def judge_quiz(self, result: GateResult, quiz: QuizResult) -> GateResult:
        """Judges by a quiz instead."""
        self.result = result.with_quiz(quiz)
        return self.result

    @property
    def _has_judged_state(self) -> bool:
        """Whether a single state was judged, which can be used by itself."""
        return len(self._judged) == 1

    @property
    def _median_epoch(self) -> int:
        """The median of the judged states' epochs; 0 if the loss fell in half of the trainings at most."""
        return median_low([progress.best_epoch for progress in self.progress[: len(self._judged)]])

    @contextmanager
    def in_judged_state(self, result: GateResult) -> Iterator[None]:
        """Context in which the adaptation is in the judged state, with folds that of the first one."""
        if not (result.is_refit and self._judged):
            yield
            return
        with self.keeping_state():
            restore(self.adaptation, self.judged_states[0])
            yield

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """Context at whose end the adaptation's weights are as before."""
        final = snapshot(self.adaptation)
        try:
            yield
        finally:
            restore(self.adaptation, final)

    def score(self, adaptation: Adaptation, chosen: list[Outline]) -> HeldOutLoss:
        """Returns the losses of examples with another adaptation, which is attached to the base model now."""
        tokens_of, options, device = self.task.dataset.all_examples, self.task.options, self.base.device
        check, words = self._breaks.check, self._words()
        examples = [tokens_of[outline.number] for outline in chosen]
        with scoring(
            adaptation.model, examples, self._collator, device, self._on_event, options, check, words
        ) as losses:
            return losses()

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
            self.adaptation,
            task.recipe,
            examples,
            self._collator,
            self._on_event,
            task.options,
            self.guard,
            self._breaks,
            self._words,
        )

    def _test_base(self, trainer: Trainer, schedule: Schedule, fresh: list[Tensor]) -> None:
        """Tests with `fresh` weights, or if there are none with the present ones, unless an earlier process has."""
        progress = trainer.progress
        if progress.before is not None:
            return
        if not self._base_losses.knows(schedule.test):
            try:
                if fresh:
                    restore(self.adaptation, fresh)
                self._base_losses.compute(trainer.learner, schedule.test)
            finally:
                if fresh:
                    restore(self.adaptation, progress.best_state)
        progress.before = self._base_losses.of(schedule.test)
        self._on_event(Evaluated(trainer.phase, "test", 0, progress.before.mean, False))

    def _train_last(self, learner: RecoveringLearner, start: list[Tensor]) -> float | None:
        """Trains on all documents from `start`, at most for the median number of epochs of the trainings before.

        Returns the loss on the validation documents after that; None if there are none.
        """
        progress = self._take_over(len(self._judged))
        if progress is None:
            schedule = self.task.schedules[-1]
            if self.progress:
                schedule.stop_after(self._median_epoch)
                learner.plain.start_again(start)
            trainer = self._prepare_trainer(learner, len(self._judged))
            progress = trainer.progress
            if not progress.is_over:
                trainer.train(schedule)
            progress.after = evaluate(learner, schedule.test) if self._judged else HeldOutLoss()
            if self._judged:
                self._on_event(Evaluated(trainer.phase, "train", schedule.last_epoch, progress.after.mean, True))
        return progress.after.mean if self._judged else None

    def _undo_last(self, error: BaseException) -> float:
        """Restores the judged state after an error of the last training; raises it again, unless the loss was NaN."""
        if self._has_judged_state:
            restore(self.adaptation, self.judged_states[0])
            if isinstance(error, NonFiniteLoss):
                self.progress[-1].is_over, self.progress[-1].after = True, HeldOutLoss()
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

    def _prepare_trainer(self, learner: RecoveringLearner, number: int) -> Trainer:
        """Prepares a training, as far as an earlier process has come with it."""
        found, schedule, phase = self._progress_before(number), self.task.schedules[number], self._phase_of(number)
        if found is not None and found.steps:
            progress = found
        elif found is not None:  # the evaluation before the first step is repeated
            progress = TrainingProgress(phase, before=found.before)
        else:
            progress = TrainingProgress(phase)
        # Before the learner prepares, so that an interruption finds this training's progress, not the last fold's.
        self.progress.append(progress)
        self._on_event(TrainingStarted(phase, schedule.last_epoch, *schedule.num_documents))
        state = self._resumed.learner if progress.is_running else None
        learner.prepare(schedule, self.task.schedules[number + 1 :], state)
        if progress.is_over:
            restore(self.adaptation, progress.best_state)
        self._forget_resumed()
        recipe = self.task.recipe.learning_on() if schedule.learns_on else self.task.recipe
        self._trainer = Trainer(learner, recipe, self._on_event, phase, progress, self.clock, self._base_losses)
        return self._trainer

    def _phase_of(self, number: int) -> str:
        if number == len(self._judged):
            return "all documents"
        return f"fold {number + 1}" if len(self._judged) > 1 else "train"


def _word_reader(base: BaseModel, task: Task) -> WordReader | None:
    """Returns what reads the words of test documents; None if a quiz decides, or if the tokens' text is not known."""
    if task.dataset.quiz is not None:
        return None
    try:
        return WordReader(base.vocabulary, base.device)
    except ModelError:
        return None
