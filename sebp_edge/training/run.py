"""Trains and tests one adaptation, on one split of the documents, or on folds if there are few documents."""

from dataclasses import dataclass, replace
from statistics import median_low

from sebp_edge.events import Evaluated, Notice, Sink, TrainingStarted
from sebp_edge.machine import devices
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import Adaptation, attach, snapshot
from sebp_edge.models.loading import BaseModel
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.evaluation import Comparison, HeldOutLoss, compare, evaluate
from sebp_edge.training.loop import Progress, Trainer
from sebp_edge.training.recovery import RecoveringLearner
from sebp_edge.units import duration

# A run that is expected to take longer sends a notice.
SLOW_SECONDS = 180


@dataclass(frozen=True)
class GateResult:
    """Losses on the test documents before and after the training, which decide whether to keep the adapter.

    Attributes:
        before, after: the test losses; with folds, those of all folds together.
        final: with folds, the loss after the last training, on all documents, which it was trained on; None without
            folds, or if there was no last training.
    """

    before: HeldOutLoss
    after: HeldOutLoss
    final: HeldOutLoss | None = None

    @property
    def comparison(self) -> Comparison:
        return compare(self.before, self.after)

    @property
    def kept(self) -> bool:
        """Whether to keep the adapter: it passed on the test documents and, with folds, the final one passed on all."""
        return self.comparison.kept and (self.final is None or compare(self.before, self.final).kept)


class TrainingRun:
    """Trains and tests an adaptation; afterwards, or after a stop, `adaptation` is attached in its best state.

    Args:
        schedules: a single schedule, or one for each fold and a last one on all documents.

    Attributes:
        adaptation: the trained adaptation; None before the first training.
        progress: the progress of each training, in order.
        guard: the memory limit and peak.
    """

    def __init__(
        self,
        base: BaseModel,
        dataset: Dataset,
        schedules: list[Schedule],
        recipe: Recipe,
        seed: int,
        on_event: Sink,
        options: MemoryOptions,
        guard: MemoryGuard,
    ):
        self.base, self.dataset, self.recipe, self.guard = base, dataset, recipe, guard
        self._schedules, self._seed, self._on_event, self._options = schedules, seed, on_event, options
        self.adaptation: Adaptation | None = None
        self.progress: list[Progress] = []

    def train_and_test(self) -> GateResult:
        """Trains on one split and tests on its test documents.

        With folds, each document is tested in a training that has not seen it. If the result is worth keeping, a last
        training runs on all documents, for as many epochs as the median of the folds' best epochs; its loss on these
        documents must be better than the base model's.
        """
        self._announce_slow_run()
        self.adaptation = attach(self.base, self.recipe, self._seed)
        collator = Collator(self.dataset.context_length, self.base.pad_token_id)
        with RecoveringLearner(
            self.adaptation, self.recipe, self.dataset.examples, collator, self._on_event, self._options, self.guard
        ) as learner:
            if len(self._schedules) == 1:
                return self._run(learner, self._schedules[0], "train")
            *folds, last = self._schedules
            fresh, parts = snapshot(self.adaptation), []
            for number, schedule in enumerate(folds, start=1):
                parts.append(self._run(learner, schedule, f"fold {number}"))
                learner.start_again(fresh)
            gate_result = GateResult(
                HeldOutLoss.merged([part.before for part in parts]), HeldOutLoss.merged([part.after for part in parts])
            )
            if not gate_result.kept:
                return gate_result
            last.last_epoch = max(1, median_low([progress.best_epoch for progress in self.progress]))
            return replace(gate_result, final=self._run_on_all(learner, last))

    def detach(self) -> None:
        """Detaches the adaptation and restores the base model."""
        if self.adaptation is not None:
            self.adaptation.detach()
            self.adaptation = None

    def _run(self, learner: RecoveringLearner, schedule: Schedule, phase: str) -> GateResult:
        trainer = self._prepare_trainer(learner, schedule, phase)
        before = evaluate(learner, schedule.test)
        self._on_event(Evaluated(phase, "test", 0, before.mean, False))
        best = trainer.train(schedule)
        after = evaluate(learner, schedule.test)
        self._on_event(Evaluated(phase, "test", best.best_epoch, after.mean, True))
        return GateResult(before, after)

    def _run_on_all(self, learner: RecoveringLearner, schedule: Schedule) -> HeldOutLoss:
        phase = "all documents"
        self._prepare_trainer(learner, schedule, phase).train(schedule)
        loss = evaluate(learner, schedule.test)
        self._on_event(Evaluated(phase, "train", schedule.last_epoch, loss.mean, True))
        return loss

    def _prepare_trainer(self, learner: RecoveringLearner, schedule: Schedule, phase: str) -> Trainer:
        # Before the learner prepares, so that an interruption finds this training's progress, not the last fold's.
        trainer = Trainer(learner, self.recipe, self._on_event, phase)
        self.progress.append(trainer.progress)
        self._on_event(TrainingStarted(phase, self.recipe.epochs, *schedule.num_documents))
        learner.prepare(schedule)
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
        schedules = [schedule for schedule in self._schedules if not schedule.trains_on_all]
        passes = 4 if self.recipe.method == "lora" else 6
        operations = passes * self.base.num_parameters * sum(schedule.num_tokens for schedule in schedules)
        return 2 * operations / devices.matmul_rate(self.base.device, self.base.dtype)
