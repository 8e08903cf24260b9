"""Adapts a model to texts: from reading them to a saved version."""

import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import median

from sebp_edge.basics.files import storage_errors
from sebp_edge.basics.stopping import PauseRequested
from sebp_edge.basics.units import duration
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import saved_bytes
from sebp_edge.engine.models.loading import BaseModel, decoder_config
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.engine.training.gate import Gate, GateResult, Life
from sebp_edge.engine.training.kernels_ahead import compiling_ahead
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.run import Task
from sebp_edge.errors import (
    BaseModelMismatch,
    BudgetExceeded,
    Interrupted,
    MachineError,
    NonFiniteLoss,
    StorageError,
    TrainingStopped,
)
from sebp_edge.events import AdapterSaved, Notice
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.run import work_ahead
from sebp_edge.run.adaptation_job import AdaptationJob
from sebp_edge.run.assessment import Assessor
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.job import Phase
from sebp_edge.run.live_training import LiveTraining
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.preparation import PlannedTraining, Prepared
from sebp_edge.run.remaining import Remaining
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.saving import NewVersion, Place, describe_activation, describe_location
from sebp_edge.run.texts_comparison import compare_with_active
from sebp_edge.run.unchanged import UnchangedResult, find_unchanged
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.saved import SavedAdapter

# An adaptation that is expected to take longer sends a notice.
SLOW_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an adaptation begins and ends: see `Personalizer.adapt`."""

    activate_anyway: bool = False
    fresh: bool = False
    sync: bool = False
    keep_samples: bool = False


def adapt(call: ModelCall, place: Place, texts, options: Options, job: AdaptationJob) -> AdaptResult | UnchangedResult:
    """Adapts the model to texts; see `Personalizer.adapt`."""
    call.job.begin()
    preparation = _read(call, place, texts, options, job)
    if isinstance(preparation, UnchangedResult):
        return preparation
    return Adapting(preparation, place, options, job, compares=place.out is None).run()


def adapt_again(
    call: ModelCall, place: Place, remaining: Remaining, job: AdaptationJob, *, activate_anyway: bool
) -> SavedAdapter:
    """Trains from the base model on the documents that remain of a version, with its splits, recipe and seed.

    The new version is saved, outside the store if the place is; the gate compares it with the base model only.
    """
    record = remaining.record
    call = replace(call, recipe=Recipe.of_record(record.recipe), seed=record.seed)
    if call.load(call.recipe).fingerprint != record.fingerprint:
        raise BaseModelMismatch(
            f"The adapter was made for {record.base_model}, not for these weights of {call.reference.public_name}; "
            f"use {record.model!r}."
        )
    history = job.history(place.adapter, remaining.history)
    preparation = TrainingPreparation(call, job.same_texts(remaining.reading, call), history, keeps_kind=True)
    call.job.begin()
    options = Options(activate_anyway=activate_anyway)
    return Adapting(preparation, place, options, job, compares=False).run()


def _read(
    call: ModelCall, place: Place, texts, options: Options, job: AdaptationJob
) -> TrainingPreparation | UnchangedResult:
    """Reads texts beside those that the active version has learnt; returns a result if nothing is new."""
    if place.out is not None:
        return TrainingPreparation(*call.with_texts(texts))
    history = job.history(place.adapter)
    call, reading = call.with_texts(texts, None if options.fresh else place.adapter)
    reading = job.same_texts(reading, call)
    preparation = TrainingPreparation(call, reading, job.drawn_from(history), keeps_splits=job.has_lost_texts)
    active = compare_with_active(place.store, place.name, call.reference, call.recipe, call.seed, reading)
    unchanged = find_unchanged(place.adapter, active, reading, fresh=options.fresh, sync=options.sync)
    if unchanged is not None:
        return unchanged
    if active is not None and active.name_in_use is not None and job.resumed is None:
        call.notify(active.name_in_use)
    if not options.fresh:
        preparation.learn_on_from(active, sync=options.sync)
        if preparation.starts_over:
            call.notify(Notice(preparation.starts_over))
    return preparation


class Adapting:
    """One adaptation to texts that were read.

    Args:
        compares: whether the gate compares it with earlier versions.
    """

    def __init__(
        self, preparation: TrainingPreparation, place: Place, options: Options, job: AdaptationJob, *, compares: bool
    ):
        self._call, self._preparation = preparation.call, preparation
        self._place, self._options, self._job, self._compares = place, options, job, compares

    def run(self) -> AdaptResult | UnchangedResult:
        """Plans and trains within the memory budget, judges and assesses the result, and saves it.

        Raises:
            TrainingStopped: it was stopped, or ended by the budget or by a loss that is not finite.
        """
        call, resumed, planned = self._call, self._job.resumed, self._plan()
        peak = resumed.fixed.peak if resumed else planned and planned.plan.chosen.peak
        training = LiveTraining(call, self._job.files)
        try:
            with call.make_guard(planned and planned.plan, peak) as guard:
                if (unchanged := self._begin(training, guard, planned, peak)) is not None:
                    return unchanged
                handled, was_active = sys.exception(), self._place.active_version
                call.in_use.detach_adapter()
                try:
                    judged = self._train(training)
                except BaseException as error:
                    self._give_up(training, error, handled)
                    raise
                saved, overtaken_by = self._save(training, judged, was_active)
                return self._assess(training, judged, saved, overtaken_by)
        finally:
            training.end()

    def _plan(self) -> PlannedTraining | None:
        """Plans the training within the budget; returns None without one, or if it was planned when it began."""
        if (unused := devices.unused_gpus(self._call.device)) is not None:
            self._call.notify(Notice(unused))
        planned, resumed = None, self._job.resumed
        if resumed is None:
            planned = self._preparation.plan_within_budget()
        elif resumed.fixed.peak is not None:
            self._preparation.refuse_less_memory(resumed.fixed.peak)
        if planned is not None:
            self._lay_out(planned.prepared, planned.schedules, planned.pace, work_ahead.loading(planned.plan.chosen))
        self._call.job.enter(work_ahead.LOAD)
        return planned

    def _begin(
        self, training: LiveTraining, guard: MemoryGuard, planned: PlannedTraining | None, peak: int | None
    ) -> UnchangedResult | None:
        """Loads the model, prepares the texts for it, and begins the trainings; returns a result if nothing is new.

        The model is no variable of `run`, whose frame an error keeps.
        """
        resumed, preparation = self._job.resumed, self._preparation
        recipe, options = (resumed.recipe, resumed.options) if resumed else preparation.chosen(planned)
        is_planned = planned is not None or peak is not None
        base, prepared = self._load(recipe, planned, options.streamed_blocks if is_planned else None)
        if prepared.starting_point.has_nothing_new:
            return UnchangedResult.of(prepared.starting_point.active)
        prepared, schedules = self._schedule(base, recipe, options, prepared, planned)
        training.texts = self._fix(base, recipe, options, prepared, peak)
        if peak is None:
            options = preparation.fill_free_memory(recipe, options, prepared, schedules)
        folders = prepared.starting_point.folders
        task = Task(prepared.dataset, schedules, recipe, self._call.seed, options, folders)
        training.begin(base, task, guard, resumed and resumed.state)
        return None

    def _load(
        self, recipe: Recipe, planned: PlannedTraining | None, streamed: int | None
    ) -> tuple[BaseModel, Prepared]:
        """Loads the model and encodes the texts; on a GPU, kernels are compiled meanwhile."""
        call, preparation, ahead = self._call, self._preparation, nullcontext()
        if call.on_gpu:
            lengths = [document.num_characters for document in preparation.reading.documents]
            config = decoder_config(call.reference)
            ahead = compiling_ahead(config, recipe, call.device, median(lengths) if lengths else 0)
        with ahead:
            base = call.load(recipe, streamed)
            prepared = preparation.encode(base, planned)
        start = prepared.starting_point
        if not start.has_nothing_new:
            start.refuse_other_base(base.fingerprint)
            if start.event is not None and start.summary != preparation.starts_over:
                call.notify(start.event)
        return base, prepared

    def _schedule(
        self,
        base: BaseModel,
        recipe: Recipe,
        options: MemoryOptions,
        prepared: Prepared,
        planned: PlannedTraining | None,
    ) -> tuple[Prepared, list[Schedule]]:
        """Returns the dataset with the base model's answers to general text, and the schedules of the trainings."""
        call, preparation = self._call, self._preparation
        schedules = preparation.schedule(prepared, planned)
        rate = devices.matmul_rate(base.device, base.dtype)
        counted = work_ahead.seconds_of_a_token(base.num_parameters, rate, on_gpu=call.on_gpu)
        self._lay_out(prepared, schedules, planned.pace if planned else work_ahead.Pace(counted))
        if (seconds := call.job.seconds_left) > SLOW_SECONDS:
            device, less = call.device.type.upper(), "a smaller model, fewer texts or fewer epochs take less time"
            call.notify(Notice(f"Training will take about {duration(seconds)} on this {device}; {less}."))
        if prepared.dataset.general:
            with call.base_model_alone("while it reads general text"):
                prepared = preparation.teach(prepared, base, options)
            schedules = preparation.schedule(prepared, planned)
        self._place.store.check_disk_space(len(schedules) * saved_bytes(base, recipe), self._place.out)
        return prepared, schedules

    def _fix(
        self, base: BaseModel, recipe: Recipe, options: MemoryOptions, prepared: Prepared, peak: int | None
    ) -> VersionTexts:
        """Writes down what the training begins with, so that it can be gone on with; returns what it will know."""
        call, dataset = self._call, prepared.dataset
        if self._place.out is not None:
            return VersionTexts()
        texts = VersionTexts.of(self._preparation.reading, dataset, prepared.starting_point, call.reference)
        texts = self._job.known_by(texts)
        self._job.fix(call, texts, dataset.all_examples, base.fingerprint, recipe, options, peak)
        return texts

    def _train(self, training: LiveTraining) -> GateResult:
        """Trains, and tests beside the earlier versions; returns what the gate says."""
        call, place, run = self._call, self._place, training.run
        checks = (training.check, call.interruptions.deliver)
        assessor = training.assessor = Assessor(run, self._preparation.reading.documents, call.job, checks)
        life = Life() if place.out else assessor.examine_life(place.adapter, compares=self._compares)
        dataset = run.task.dataset
        call.job.enter(work_ahead.ATTACH)
        gate = Gate(run.task.recipe.margin, dataset.draw.cluster_of, not dataset.concerns, life)
        return assessor.ask_quiz(run.train(gate, assessor.known.base))

    def _save(
        self, training: LiveTraining, judged: GateResult, was_active: int | None
    ) -> tuple[SavedAdapter, int | None]:
        """Saves the adapter; if it is better, uses it from now on, and activates it in the store.

        From now on, no stop loses it.

        Args:
            was_active: the version that was active when the training began.

        Returns:
            The version, and the one that became active meanwhile, if any.
        """
        call, place, overtaken_by = self._call, self._place, None
        call.interruptions.defer()
        call.job.enter(work_ahead.SAVE)
        is_activated = judged.passed or self._options.activate_anyway
        version = NewVersion.of(training.run, training.texts, None, keeps_words=self._options.keep_samples)
        try:
            saved = place.save(version)
            if is_activated and place.out is None:
                compared = judged.life.active
                saved, overtaken_by = self._activate(saved, compared.version if compared else was_active)
        except BaseException:
            self._discard(training)
            raise
        if is_activated and overtaken_by is None:
            call.in_use.use_adapter(training.run.adaptation, saved.path, version.record)
        training.leave_checkpoints()
        self._job.end()
        return saved, overtaken_by

    def _assess(
        self, training: LiveTraining, judged: GateResult, saved: SavedAdapter, overtaken_by: int | None
    ) -> AdaptResult:
        """Assesses the saved adapter, and completes its version; a pause leaves out what is not assessed yet.

        Raises:
            Interrupted: the assessment was stopped.
            MachineError: memory ran out.
        """
        call, run, assessment, handled = self._call, training.run, None, sys.exception()
        where = describe_location(saved)
        outcome = Interrupted(f"Interrupted after the training: {where}.", name=saved.name, version=saved.version)
        call.interruptions.complete(outcome)
        try:
            self._announce(saved)
            with suppress(PauseRequested):
                assessment = training.assessor.assess(judged)
            version = NewVersion.of(run, training.texts, assessment, keeps_words=self._options.keep_samples)
            if assessment is not None:
                saved = self._complete(saved, version)
        except KeyboardInterrupt as stop:
            raise outcome from stop
        except Exception as error:
            if not (isinstance(error, BudgetExceeded) or devices.ran_out_of_memory(error)):
                raise
            devices.clear_frames(error, handled)
            devices.release_memory(call.device)
            memory = f"{call.device.type.upper()} memory"
            raise MachineError(
                f"Out of {memory} after the training, while the adapter was assessed: {where}."
            ) from error
        finally:
            if run.adaptation is None or call.in_use.adaptation is not run.adaptation:
                self._discard(training)
        return AdaptResult(
            **vars(version.facts) | vars(saved),
            reference=call.reference,
            store=self._place.store,
            overtaken_by=overtaken_by,
            phases=call.job.spent,
            authors=self._preparation.reading.authors,
        )

    def _complete(self, saved: SavedAdapter, version: NewVersion) -> SavedAdapter:
        """Writes what was assessed of a saved version, whose record is then as new; a disk that refuses it is told."""
        version = replace(version, record=replace(version.record, created=saved.record.created))
        try:
            with storage_errors("Cannot write to", saved.path, "; the version is saved without what was assessed"):
                version.describe(saved.path)
        except StorageError as error:
            self._call.job(Notice(str(error)))
        return replace(saved, record=version.record)

    def _give_up(self, training: LiveTraining, error: BaseException, handled: BaseException | None) -> None:
        """Restores the adapter that was in use; saves the best state so far if the training was stopped.

        Args:
            handled: an error that was handled before, whose frames keep what they reference.

        Raises:
            TrainingStopped: a stop, the memory budget or a loss that is not finite ended it; says what was saved.
            MachineError: memory ran out for a single example.
        """
        if isinstance(error, PauseRequested):
            devices.clear_frames(error, handled)
            return
        if isinstance(error, KeyboardInterrupt | NonFiniteLoss | BudgetExceeded):
            self._call.interruptions.defer()
            devices.clear_frames(error, handled)
            raise self._save_best_state(training, error) from error
        out_of_memory = devices.ran_out_of_memory(error)
        if out_of_memory:
            devices.clear_frames(error, handled)
            devices.release_memory(self._call.device)
        self._discard(training)
        if out_of_memory:
            raise self._out_of_memory_error(training) from error

    def _lay_out(self, prepared: Prepared, schedules: list[Schedule], pace: work_ahead.Pace, *before: Phase) -> None:
        earlier = {self._place.active_version} - {None} if self._compares else set()
        if earlier:
            earlier |= {*read_best_versions(self._place.adapter).best[:1]}
        recipe = self._preparation.recipe.with_defaults()
        ahead = work_ahead.phases_ahead(prepared.dataset, schedules, recipe, pace, num_earlier=len(earlier))
        self._call.job.lay_out([*before, *ahead])

    def _activate(self, saved: SavedAdapter, was_active: int | None) -> tuple[SavedAdapter, int | None]:
        """Activates the new version; unless another one became active meanwhile, which is returned and stays."""
        adapter = self._place.adapter
        if self._options.activate_anyway:
            return adapter.activate(saved.version), None
        saved, active = adapter.activate_after(saved.version, was_active)
        return saved, None if saved.active else active

    def _save_best_state(self, training: LiveTraining, stop: BaseException) -> TrainingStopped:
        """Saves the best state so far as a version that is not active, if it has learnt anything; returns the error."""
        run, job = training.run, self._job
        error_type, reason = (
            (Interrupted, "Interrupted.") if isinstance(stop, KeyboardInterrupt) else (type(stop), str(stop))
        )
        progress = run.progress[-1] if run.progress else TrainingProgress()
        then = "" if error_type is NonFiniteLoss else job.way_to_go_on
        try:
            # The state of a training whose loss is not measured tells nobody whether it is of use.
            if run.result is None and not (progress.best_epoch and progress.best_validation):
                outcome = f"no version was saved. To{then}" if then and job.can_go_on else "nothing was saved."
                return error_type(f"{reason} No state better than the start was found, so {outcome}")
            # It has not learnt all texts, so that no training can learn on from it.
            texts = replace(training.texts, known=None)
            version = NewVersion.of(run, texts, None, keeps_words=self._options.keep_samples)
            saved = replace(self._place, out=None).save(version, prefix=reason)
        finally:
            self._discard(training)
        job.survives(saved.version)
        self._announce(saved)
        state = "best state so far" if run.result is None else "state that was tested"
        return error_type(
            f"{reason} The {state} is saved as version {saved.version} of the adapter {saved.name!r}; it is not "
            f"active. To activate it: {describe_activation(self._place.store, saved)}{then and f'; to{then}'}",
            name=saved.name,
            version=saved.version,
        )

    def _announce(self, saved: SavedAdapter) -> None:
        self._call.remember_model(saved.record)
        # Not `notify`, which could still stop the call.
        self._call.job(AdapterSaved(saved.name, saved.version, str(saved.path), saved.active))

    def _discard(self, training: LiveTraining) -> None:
        """Detaches the new adapter, and restores the one that was in use."""
        training.run.detach()
        self._call.in_use.restore_adapter(self._call.job)

    def _out_of_memory_error(self, training: LiveTraining) -> MachineError:
        """Returns the error for a single example that does not fit into memory."""
        call, has_begun = self._call, any(progress.steps for progress in training.run.progress)
        when = "while training" if has_begun else "before the first step"
        smaller, others = "Choose a smaller model or a shorter context", "close other programs"
        advice = f"{smaller}, or {others}"
        if call.budget is not None:
            advice = f"{smaller}, {others}, or raise the memory budget of {call.budget}"
        return MachineError(f"Out of {call.device.type.upper()} memory {when}; nothing was saved. {advice}.")
